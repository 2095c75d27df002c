# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The real executor, links and updates on simulated hosts and devices: no process groups, no GPU."""
