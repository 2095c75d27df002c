# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optimizers, parameter roles and the corrections of delayed gradients."""
