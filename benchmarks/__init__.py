# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Schedules side by side: one stack of layers under every contender, with results checked in the same run."""
