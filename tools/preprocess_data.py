# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Tokenize text into Megatron's indexed data sets: `megatron-async preprocess`."""

import sys

from megatron_async.cli.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
