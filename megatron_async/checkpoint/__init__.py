# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints in Megatron's distributed format, published atomically, verified before use, resumed bit-exactly."""
