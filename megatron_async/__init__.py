# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core training with a bubble-free pipeline: gradients one step old, as good as a synchronous run."""

__version__ = "0.1.0"
