# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Preparation of data: sources, tokenizers, Megatron's indexed format, a corpus without a download."""
