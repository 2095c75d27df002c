# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: plan, validate, simulate and draw a table, without torch or Megatron.

schedule = make_schedule("2bw", stages=4, microbatches=8, batches=4)
validate(schedule)
result = simulate(schedule, StageCosts(forward=1.0, backward=2.0))
"""

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Schedule, Update
from megatron_async.schedules.arguments import is_delayed, schedule_of
from megatron_async.schedules.registry import SCHEDULES, ScheduleDefinition, make_schedule, register, schedule_problems
from megatron_async.schedules.simulate import SimulationResult, Simulator, StageCosts, simulate
from megatron_async.schedules.validate import ScheduleError, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "Forward",
    "Reduce",
    "Schedule",
    "ScheduleDefinition",
    "ScheduleError",
    "SimulationResult",
    "Simulator",
    "StageCosts",
    "Update",
    "is_delayed",
    "make_schedule",
    "register",
    "schedule_of",
    "schedule_problems",
    "simulate",
    "validate",
]
