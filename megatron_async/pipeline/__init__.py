# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Runs a schedule's table on one rank: links between stages, weight versions, gradient generations, updates."""
