# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Plan a run before it starts: parameters, memory, schedule, time."""
