# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Moved to `megatron_async.report`."""

from megatron_async.report import *  # noqa: F403
