# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Evaluate a Hugging Face folder with lm-eval: `megatron-async evaluate`."""

import sys

from megatron_async.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
