# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The fastest layouts of a run: `megatron-async plan`."""

import sys

from megatron_async.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
