# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Ranges of hyper-parameters, and the check that reports every value outside its range at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``; each end belongs to the range unless it is open."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            return False
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"{left}{self.low:g}, {self.high:g}{right}"


@dataclass(frozen=True, slots=True)
class Count:
    """Whole numbers from ``low`` on."""

    low: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= self.low

    def __str__(self) -> str:
        return f"integers >= {self.low}"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few values."""

    values: tuple[object, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return " or ".join(str(value) for value in self.values)


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple of ``count`` numbers, each from the same range."""

    count: int
    each: Range

    def __contains__(self, value: object) -> bool:
        return isinstance(value, tuple | list) and len(value) == self.count and all(v in self.each for v in value)

    def __str__(self) -> str:
        return f"{self.count} values in {self.each}"


Rule = Range | Count | Choice | Several

NON_NEGATIVE = Range(0.0, math.inf, high_open=True)
POSITIVE = Range(0.0, math.inf, low_open=True, high_open=True)
DECAY = Range(0.0, 1.0, high_open=True)
"""The rate of a moving average: the weight of its past."""
FLAG = Choice((True, False))


def check(optimizer: str, rules: Mapping[str, Rule], values: Mapping[str, object]) -> None:
    """Check every value against its rule.

    Raises:
        ValueError: naming each value outside its range, with the range.
    """
    problems = [
        f"{name} = {values[name]!r}, allowed: {rule}" for name, rule in rules.items() if values[name] not in rule
    ]
    if problems:
        raise ValueError(f"{optimizer}: " + "; ".join(problems))
