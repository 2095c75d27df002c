# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Schedule and delays of parsed arguments.

`--gradient-delay` is a number of updates or the name of a delayed schedule, with `:P` if its delays depend on the
number P of stages.
"""

import argparse
from itertools import groupby
from math import gcd

from megatron_async.schedules.registry import SCHEDULES, ScheduleDefinition

LARGEST_DELAY = 64
"""Largest N of `--gradient-delay N`. Each update of delay needs a copy of the weights."""


def schedule_of(args: argparse.Namespace) -> ScheduleDefinition:
    """The schedule that `--pipeline-schedule` names."""
    return SCHEDULES[args.pipeline_schedule]


def is_delayed(args: argparse.Namespace) -> bool:
    """Whether gradients are delayed, by the schedule or by the delay oracle."""
    return schedule_of(args).delayed or args.gradient_delay is not None


def oracle_problem(value: str, layers: int | None) -> str | None:
    """Problem with a value of `--gradient-delay`, or None."""
    if value.isdecimal() and int(value) <= LARGEST_DELAY:
        return None
    definition, stages = _parse(value)
    if definition is None or stages < 1:
        delayed = [definition for definition in SCHEDULES.values() if definition.delayed]
        names = ", ".join(f"{each.name}:P" if _depends_on_stages(each) else each.name for each in delayed)
        return (
            f"--gradient-delay {value}: must be a whole number from 0 to {LARGEST_DELAY}, or one of {names}, with a "
            "number P of stages."
        )
    parts = len(definition.layer_delays(stages))
    if layers is not None and layers < parts:
        return f"--gradient-delay {value} needs at least {parts} layers; --num-layers is {layers}. Change one of them."
    return None


def oracle_delays(value: str) -> tuple[int, ...]:
    """Delay of each part of the layers, from first to last, for a correct value of `--gradient-delay`."""
    if value.isdecimal():
        return (int(value),)
    definition, stages = _parse(value)
    assert definition is not None
    return definition.layer_delays(stages)


def delay_pattern(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """Delays from the first to the last layer as (delay, relative number of layers), independent of the layout.

    Every uniform delay except 0 gives 1: the optimizer state fits any of them.
    """
    if getattr(args, "gradient_delay", None) is not None:
        delays = oracle_delays(args.gradient_delay)
    else:
        delays = SCHEDULES[getattr(args, "pipeline_schedule", "1f1b")].layer_delays(args.pipeline_model_parallel_size)
    runs = [(delay, len(list(run))) for delay, run in groupby(delays)]
    if len(runs) == 1:
        return ((min(1, runs[0][0]), 1),)
    divisor = gcd(*(length for _, length in runs))
    return tuple((delay, length // divisor) for delay, length in runs)


def _parse(value: str) -> tuple[ScheduleDefinition | None, int]:
    """Schedule and number of stages of a value such as "wpipe" or "pipedream:4"; None for a wrong value."""
    name, colon, number = value.partition(":")
    definition = SCHEDULES.get(name)
    if definition is None or not definition.delayed or _depends_on_stages(definition) != bool(colon):
        return None, 0
    return definition, (int(number) if number.isdecimal() else 0) if colon else 1


def _depends_on_stages(definition: ScheduleDefinition) -> bool:
    return any(definition.delays(3, stage) != definition.delays(1, 0) for stage in range(3))
