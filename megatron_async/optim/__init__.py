# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optimizers, their parameter groups and hyper-parameters, corrections of the delay, QK-clip."""

from megatron_async.optim import algorithms as algorithms  # registers every optimizer of this package
