# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints, both ways. `families` has the architectures."""
