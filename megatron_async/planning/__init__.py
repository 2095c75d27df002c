# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What a run will hold and how long it will take, before it is started: parameters, memory, schedule, time."""
