# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checks of a schedule's table: what would make a run wrong or hang, found before a process is started."""

from collections import defaultdict
from typing import NoReturn

from megatron_async.schedules.actions import Action, Backward, Compute, Forward, Reduce, Schedule, Update
from megatron_async.schedules.dependencies import Key, execute, key_of, number_of, previous_stage
from megatron_async.schedules.versions import alive_versions

_CONTEXT_ROWS = 8


class ScheduleError(ValueError):
    """A table breaks a rule.

    Attributes:
        rule: the rule in a few words.
        rank: the rank whose list breaks it.
        step: index in that list; its length if something is missing at the end.
    """

    def __init__(self, schedule: Schedule, *, rule: str, rank: int, step: int, detail: str) -> None:
        row = schedule.actions[rank]
        action = f" ({row[step]})" if step < len(row) else " (end of the list)"
        super().__init__(
            f"schedule {schedule.name} with {schedule.stages} stages and {schedule.microbatches}"
            f" micro-batches breaks the rule '{rule}' on rank {rank}, step {step}{action}: {detail}\n"
            + format_table(schedule, step)
        )
        self.rule = rule
        self.rank = rank
        self.step = step


def format_table(schedule: Schedule, marked_step: int) -> str:
    """The table around a step as text, one line a step and one column a rank, with that step marked."""
    longest = max((len(row) for row in schedule.actions), default=0)
    first = max(0, marked_step - _CONTEXT_ROWS)
    stop = min(max(longest, marked_step + 1), marked_step + _CONTEXT_ROWS + 1)
    width = max((len(str(action)) for row in schedule.actions for action in row), default=0)
    width = max(width, len(f"rank {schedule.stages - 1}"))
    label = max(len("step"), len(str(stop)))
    lines = ["  ".join(["step".rjust(label)] + [f"rank {r}".ljust(width) for r in range(schedule.stages)]).rstrip()]
    if first > 0:
        lines.append(f"... {first} earlier steps")
    for step in range(first, stop):
        cells = [str(row[step]) if step < len(row) else "" for row in schedule.actions]
        line = "  ".join([str(step).rjust(label)] + [cell.ljust(width) for cell in cells]).rstrip()
        lines.append(line + "  <-- HERE" if step == marked_step else line)
    if stop < longest:
        lines.append(f"... {longest - stop} later steps")
    return "\n".join(lines)


def validate(schedule: Schedule) -> None:
    """Check a table.

    The rules: every forward, backward, reduction and update exactly once; forward before backward, with the
    same version, which is the one that the version rule gives; R after the last backward of its batch, U
    after R, both in the order of batches; no more weight versions alive than allowed; no version used before
    the update that creates it or after the one that takes its place; sends and receives of each pair of
    neighbors in the same order; no deadlock.

    Raises:
        ScheduleError: names the rule, rank, step and micro-batch or batch, and shows the table around it.
    """
    for rank in range(schedule.stages):
        _RankCheck(schedule, rank).run()
    _check_link_order(schedule)
    _check_deadlock(schedule)


class _RankCheck:
    """The rules that concern one rank's list alone."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self.row = schedule.actions[rank]
        self.steps: dict[tuple[str, int, int], int] = {}

    def run(self) -> None:
        self._check_complete()
        for step, action in enumerate(self.row):
            if isinstance(action, Backward):
                self._check_backward(step, action)
            if isinstance(action, Forward | Backward):
                self._check_version_rule(step, action)
            if isinstance(action, Reduce):
                self._check_reduce(step, action)
            if isinstance(action, Update):
                self._check_update(step, action)
        self._check_order_of_batches()
        for chunk in range(self.schedule.chunks):
            self._check_version_limit(chunk)
            self._check_versions_exist(chunk)

    def _fail(self, rule: str, step: int, detail: str) -> NoReturn:
        raise ScheduleError(self.schedule, rule=rule, rank=self.rank, step=step, detail=detail)

    def _step(self, kind: str, chunk: int, number: int) -> int:
        return self.steps[kind, chunk, number]

    def _numbers(self, kind: str) -> range:
        computes = kind in (Forward.kind, Backward.kind)
        return self.schedule.microbatch_range if computes else self.schedule.update_range

    def _check_complete(self) -> None:
        rule = "each action exactly once"
        for step, action in enumerate(self.row):
            numbers = self._numbers(action.kind)
            if not 0 <= action.chunk < self.schedule.chunks or number_of(action) not in numbers:
                self._fail(
                    rule,
                    step,
                    f"{_describe(action)} of chunk {action.chunk} is not in a table of {self.schedule.chunks}"
                    f" chunks and numbers {numbers.start} .. {numbers.stop - 1}",
                )
            key = action.kind, action.chunk, number_of(action)
            if key in self.steps:
                self._fail(rule, step, f"{_describe(action)} is already at step {self.steps[key]}")
            self.steps[key] = step
        for kind in (Forward.kind, Backward.kind, Reduce.kind, Update.kind):
            for chunk in range(self.schedule.chunks):
                for number in self._numbers(kind):
                    if (kind, chunk, number) not in self.steps:
                        self._fail(rule, len(self.row), f"{_NAMES[kind]} {number} of chunk {chunk} is missing")

    def _check_backward(self, step: int, action: Backward) -> None:
        forward_step = self._step(Forward.kind, action.chunk, action.microbatch)
        if forward_step > step:
            self._fail(
                "forward before backward",
                step,
                f"the forward of micro-batch {action.microbatch} comes later, at step {forward_step}",
            )
        forward = self.row[forward_step]
        assert isinstance(forward, Forward)
        if forward.version != action.version:
            self._fail(
                "same version forward and backward",
                step,
                f"micro-batch {action.microbatch} went forward with version {forward.version} at step"
                f" {forward_step} and goes backward with version {action.version}",
            )

    def _check_version_rule(self, step: int, action: Compute) -> None:
        batch = self.schedule.batch_of(action.microbatch)
        version = self.schedule.versions[self.rank][action.chunk](batch)
        if action.version != version:
            self._fail(
                "version of the rule",
                step,
                f"micro-batch {action.microbatch} of batch {batch} must use version {version}, not {action.version}",
            )

    def _check_reduce(self, step: int, action: Reduce) -> None:
        size = self.schedule.microbatches_per_update
        for microbatch in range(action.batch * size, (action.batch + 1) * size):
            backward_step = self._step(Backward.kind, action.chunk, microbatch)
            if backward_step > step:
                self._fail(
                    "reduce after the last backward",
                    step,
                    f"the backward of micro-batch {microbatch} of batch {action.batch} comes later, at step"
                    f" {backward_step}",
                )

    def _check_update(self, step: int, action: Update) -> None:
        reduce_step = self._step(Reduce.kind, action.chunk, action.batch)
        if reduce_step > step:
            self._fail(
                "update after its reduction",
                step,
                f"the reduction of batch {action.batch} comes later, at step {reduce_step}",
            )

    def _check_order_of_batches(self) -> None:
        for kind in (Reduce.kind, Update.kind):
            for chunk in range(self.schedule.chunks):
                for batch in self.schedule.update_range[1:]:
                    step = self._step(kind, chunk, batch)
                    before = self._step(kind, chunk, batch - 1)
                    if before > step:
                        self._fail(
                            "batches in order",
                            step,
                            f"{_NAMES[kind]} {batch} comes before that of batch {batch - 1} at step {before}",
                        )

    def _check_version_limit(self, chunk: int) -> None:
        limit = self.schedule.version_limits[self.rank][chunk]
        for step, versions in alive_versions(self.schedule, self.rank, chunk):
            if len(versions) > limit:
                self._fail(
                    "number of versions alive",
                    max(step, 0),
                    f"versions {', '.join(map(str, sorted(versions)))} of chunk {chunk} are needed at once;"
                    f" at most {limit} may be alive",
                )

    def _check_versions_exist(self, chunk: int) -> None:
        """Replay the buffers: an update publishes a version and overwrites the oldest of `limit` versions."""
        limit = self.schedule.version_limits[self.rank][chunk]
        newest = self.schedule.update_range.start
        for step, action in enumerate(self.row):
            if action.chunk != chunk:
                continue
            if isinstance(action, Update):
                newest = action.batch + 1
            if isinstance(action, Forward | Backward):
                what = f"micro-batch {action.microbatch} uses version {action.version}"
                if not 0 <= action.version <= newest:
                    detail = f"{what}, but version {newest} is the newest here"
                    self._fail("version created before its use", step, detail)
                if action.version <= newest - limit:
                    detail = f"{what}, which version {action.version + limit} has replaced"
                    self._fail("version not retired before its use", step, detail)


_NAMES = {
    Forward.kind: "forward of micro-batch",
    Backward.kind: "backward of micro-batch",
    Reduce.kind: "reduction of batch",
    Update.kind: "update of batch",
}


def _describe(action: Action) -> str:
    return f"{_NAMES[action.kind]} {number_of(action)}"


def _check_link_order(schedule: Schedule) -> None:
    """A link carries one kind of traffic from one rank to another and delivers in the order of sends."""
    receives: defaultdict[tuple[int, int, str], list[tuple[Key, int]]] = defaultdict(list)
    positions: dict[Key, int] = {}
    for rank, row in enumerate(schedule.actions):
        for step, action in enumerate(row):
            positions[key_of(rank, action)] = step
            source = previous_stage(schedule, rank, action)
            if source is not None and source[0] != rank:
                receives[source[0], rank, action.kind].append((source, step))
    for (sender, receiver, _), received in receives.items():
        by_receive = [key for key, _ in received]
        by_send = sorted(by_receive, key=lambda key: positions[key])
        for expected, (actual, step) in zip(by_send, received, strict=True):
            if expected != actual:
                raise ScheduleError(
                    schedule,
                    rule="same order of sends and receives",
                    rank=receiver,
                    step=step,
                    detail=f"expects the {_NAMES[actual[1]]} {actual[3]} of chunk {actual[2]} from rank"
                    f" {sender}, which sends micro-batch {expected[3]} of chunk {expected[2]} at that point",
                )


def _check_deadlock(schedule: Schedule) -> None:
    blocked = execute(schedule).blocked
    if not blocked:
        return
    waits = [_wait(rank, *blocked[rank], schedule.actions) for rank in sorted(blocked)]
    rank = min(blocked)
    raise ScheduleError(schedule, rule="no deadlock", rank=rank, step=blocked[rank][0], detail="; ".join(waits))


def _wait(rank: int, step: int, missing: Key, rows: tuple[tuple[Action, ...], ...]) -> str:
    other, kind, chunk, number = missing
    what = f"{_NAMES[kind]} {number} of chunk {chunk}"
    return f"rank {rank} waits at {rows[rank][step]} for the {what} on rank {other}"
