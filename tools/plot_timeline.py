# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The measured timeline of a run beside its plan: `megatron-async timeline`."""

import sys

from megatron_async.cli.timeline import main

if __name__ == "__main__":
    sys.exit(main())
