# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints, both ways: Llama (SmolLM2), Qwen3-MoE (the 2B MoE), Qwen3-Next (the 10B hybrid),
Nemotron-H without experts (patterns of M, * and -)."""
