# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Presets, layers, initial weights, the GPT forward step, and conversion to Hugging Face folders."""
