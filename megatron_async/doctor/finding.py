# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What a check found."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at.
        level: FAIL where a run cannot start or will end, WARN where it loses speed or safety.
        found: the value.
        change: what to do about it; "" where nothing is to be done.
    """

    check: str
    level: Level
    found: str
    change: str = ""


def unless(good: bool, level: Level, check: str, found: str, change: str) -> Finding:
    """A finding that is OK where `good`, else `level` with what to change."""
    return Finding(check, "OK", found) if good else Finding(check, level, found, change)
