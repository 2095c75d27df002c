# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Simulated execution of a table by hosts and devices: streams, hardware queues, launches, collectives.

`simulate_device` shows what `simulate` leaves out: the time that the host adds, and runs that hang.
"""

from benchmarks.device.costs import POLICIES, Machine, Policy, StageTimes
from benchmarks.device.recorded import recorded_times
from benchmarks.device.result import LEAST_BATCHES, DeviceResult, simulate_device

__all__ = [
    "LEAST_BATCHES",
    "POLICIES",
    "DeviceResult",
    "Machine",
    "Policy",
    "StageTimes",
    "recorded_times",
    "simulate_device",
]
