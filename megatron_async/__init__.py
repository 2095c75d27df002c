# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core training with a bubble-free pipeline and gradients that are one step old."""

__version__ = "0.2.0"
