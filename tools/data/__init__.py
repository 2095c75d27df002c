# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Corpora and data files: sources, preprocessing, a corpus without a download."""
