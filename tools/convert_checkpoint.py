# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Convert between Megatron checkpoints and Hugging Face folders: `megatron-async convert`."""

import sys

from megatron_async.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
