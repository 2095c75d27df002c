# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checks of a table: find errors that would give wrong results or a hang, before any process starts."""

from collections import defaultdict
from itertools import product
from typing import NoReturn

from megatron_async.schedules.actions import Backward, Compute, Forward, Reduce, Schedule, Update
from megatron_async.schedules.dependencies import Key, execute, key_of, previous_stage
from megatron_async.schedules.versions import alive_versions

_CONTEXT_ROWS = 8
_NAMES = {
    Forward.kind: "forward of micro-batch",
    Backward.kind: "backward of micro-batch",
    Reduce.kind: "reduction of batch",
    Update.kind: "update of batch",
}


class ScheduleError(ValueError):
    """A table breaks a rule.

    Attributes:
        rule: the rule in a few words.
        rank: rank whose list breaks it.
        step: index in that list; its length if an action is missing.
    """

    def __init__(self, schedule: Schedule, *, rule: str, rank: int, step: int, detail: str) -> None:
        row = schedule.actions[rank]
        action = f" ({row[step]})" if step < len(row) else " (end of the list)"
        super().__init__(
            f"schedule {schedule.name} with {schedule.stages} stages and {schedule.microbatches}"
            f" micro-batches breaks the rule '{rule}' on rank {rank}, step {step}{action}: {detail}\n"
            + format_table(schedule, step)
        )
        self.rule, self.rank, self.step = rule, rank, step


def format_table(schedule: Schedule, marked_step: int) -> str:
    """The table around a step as text: one line per step, one column per rank, the step marked."""
    longest = max((len(row) for row in schedule.actions), default=0)
    first = max(0, marked_step - _CONTEXT_ROWS)
    stop = min(max(longest, marked_step + 1), marked_step + _CONTEXT_ROWS + 1)
    rows = [["step", *(f"rank {rank}" for rank in range(schedule.stages))]]
    for step in range(first, stop):
        rows.append([str(step), *(str(row[step]) if step < len(row) else "" for row in schedule.actions)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines[1 + marked_step - first] += "  <-- HERE"
    if first > 0:
        lines.insert(1, f"... {first} earlier steps")
    if stop < longest:
        lines.append(f"... {longest - stop} later steps")
    return "\n".join(lines)


def validate(schedule: Schedule) -> None:
    """Check a table.

    Rules: each action exactly once; forward before backward, both with the version of the rule; R after the last
    backward of its batch, U after R, both in the order of batches; a version is used after its update and before it is
    overwritten, and no more versions are alive than allowed; neighbors send and receive in the same order; no deadlock.

    Raises:
        ScheduleError: names the rule, rank, step and micro-batch or batch, and shows the table around it.
    """
    for rank in range(schedule.stages):
        _RankCheck(schedule, rank).run()
    _check_link_order(schedule)
    _check_deadlock(schedule)


class _RankCheck:
    """The rules for the list of one rank."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank, self.row = schedule, rank, schedule.actions[rank]
        self.steps: dict[tuple[str, int, int], int] = {}

    def run(self) -> None:
        self._check_complete()
        for step, action in enumerate(self.row):
            match action:
                case Forward():
                    self._check_version_rule(step, action)
                case Backward():
                    self._check_backward(step, action)
                    self._check_version_rule(step, action)
                case Reduce():
                    size = self.schedule.microbatches_per_update
                    for microbatch in range(action.batch * size, (action.batch + 1) * size):
                        self._require("reduce after the last backward", step, Backward.kind, action.chunk, microbatch)
                case Update():
                    self._require("update after its reduction", step, Reduce.kind, action.chunk, action.batch)
            if isinstance(action, Reduce | Update) and action.batch > self.schedule.update_range.start:
                self._require("batches in order", step, action.kind, action.chunk, action.batch - 1)
        for chunk in range(self.schedule.chunks):
            self._check_version_limit(chunk)
            self._check_versions_exist(chunk)

    def _fail(self, rule: str, step: int, detail: str) -> NoReturn:
        raise ScheduleError(self.schedule, rule=rule, rank=self.rank, step=step, detail=detail)

    def _require(self, rule: str, step: int, kind: str, chunk: int, number: int) -> int:
        """Step of an action that must come before `step`."""
        required = self.steps[kind, chunk, number]
        if required > step:
            self._fail(rule, step, f"the {_NAMES[kind]} {number} comes later, at step {required}")
        return required

    def _numbers(self, kind: str) -> range:
        computes = kind in (Forward.kind, Backward.kind)
        return self.schedule.microbatch_range if computes else self.schedule.update_range

    def _check_complete(self) -> None:
        rule, chunks = "each action exactly once", range(self.schedule.chunks)
        for step, action in enumerate(self.row):
            name, numbers = f"{_NAMES[action.kind]} {action.number}", self._numbers(action.kind)
            if action.chunk not in chunks or action.number not in numbers:
                detail = f"{len(chunks)} chunks and numbers {numbers.start} .. {numbers.stop - 1}"
                self._fail(rule, step, f"{name} of chunk {action.chunk} is not in a table of {detail}")
            key = action.kind, action.chunk, action.number
            if key in self.steps:
                self._fail(rule, step, f"{name} is already at step {self.steps[key]}")
            self.steps[key] = step
        for kind, chunk in product(_NAMES, chunks):
            for number in self._numbers(kind):
                if (kind, chunk, number) not in self.steps:
                    self._fail(rule, len(self.row), f"{_NAMES[kind]} {number} of chunk {chunk} is missing")

    def _check_backward(self, step: int, action: Backward) -> None:
        at = self._require("forward before backward", step, Forward.kind, action.chunk, action.microbatch)
        forward = self.row[at]
        assert isinstance(forward, Forward)
        if forward.version != action.version:
            self._fail(
                "same version forward and backward",
                step,
                f"micro-batch {action.microbatch} went forward with version {forward.version} at step {at} and goes"
                f" backward with version {action.version}",
            )

    def _check_version_rule(self, step: int, action: Forward | Backward) -> None:
        batch = self.schedule.batch_of(action.microbatch)
        version = self.schedule.versions[self.rank][action.chunk](batch)
        if action.version != version:
            detail = f"micro-batch {action.microbatch} of batch {batch} must use version {version}"
            self._fail("version of the rule", step, f"{detail}, not {action.version}")

    def _check_version_limit(self, chunk: int) -> None:
        limit = self.schedule.version_limits[self.rank][chunk]
        for step, versions in alive_versions(self.schedule, self.rank, chunk):
            if len(versions) > limit:
                names = ", ".join(map(str, sorted(versions)))
                detail = f"versions {names} of chunk {chunk} are needed at once; at most {limit} may be alive"
                self._fail("number of versions alive", max(step, 0), detail)

    def _check_versions_exist(self, chunk: int) -> None:
        """Replay the buffers: an update publishes a version and overwrites the oldest of `limit` versions."""
        limit = self.schedule.version_limits[self.rank][chunk]
        newest = self.schedule.update_range.start
        for step, action in enumerate(self.row):
            if action.chunk != chunk:
                continue
            if isinstance(action, Update):
                newest = action.batch + 1
            if isinstance(action, Compute):
                use = f"micro-batch {action.microbatch} uses version {action.version}"
                if not 0 <= action.version <= newest:
                    detail = f"{use}, but version {newest} is the newest here"
                    self._fail("version created before its use", step, detail)
                if action.version <= newest - limit:
                    detail = f"{use}, which version {action.version + limit} has replaced"
                    self._fail("version not retired before its use", step, detail)


def _check_link_order(schedule: Schedule) -> None:
    """A link carries one kind of message from one rank to another and delivers in the order of sends."""
    receives: defaultdict[tuple[int, int, str], list[tuple[Key, int]]] = defaultdict(list)
    positions: dict[Key, int] = {}
    for rank, row in enumerate(schedule.actions):
        for step, action in enumerate(row):
            positions[key_of(rank, action)] = step
            source = previous_stage(schedule, rank, action)
            if source is not None and source[0] != rank:
                receives[source[0], rank, action.kind].append((source, step))
    for (sender, receiver, _), received in receives.items():
        by_send = sorted((key for key, _ in received), key=lambda key: positions[key])
        for expected, (actual, step) in zip(by_send, received, strict=True):
            if expected != actual:
                detail = (
                    f"expects the {_NAMES[actual[1]]} {actual[3]} of chunk {actual[2]} from rank {sender}, which sends"
                    f" micro-batch {expected[3]} of chunk {expected[2]} at that point"
                )
                rule = "same order of sends and receives"
                raise ScheduleError(schedule, rule=rule, rank=receiver, step=step, detail=detail)


def _check_deadlock(schedule: Schedule) -> None:
    _, blocked = execute(schedule)
    waits = [
        f"rank {rank} waits at {schedule.actions[rank][step]} for the {_NAMES[kind]} {number} of chunk {chunk} on rank"
        f" {other}"
        for rank, (step, (other, kind, chunk, number)) in sorted(blocked.items())
    ]
    if waits:
        rank = min(blocked)
        raise ScheduleError(schedule, rule="no deadlock", rank=rank, step=blocked[rank][0], detail="; ".join(waits))
