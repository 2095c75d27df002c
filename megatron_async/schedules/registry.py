# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Definitions of the schedules, by the values of `--pipeline-schedule`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megatron_async.schedules import pipedream, two_bw, wpipe
from megatron_async.schedules.actions import Action, Schedule, VersionRule, stale_versions
from megatron_async.schedules.segment import Segment

NormScope = Literal["model", "chunk", "stage"]
"""Parameters that one gradient norm clips: the whole model, one chunk of every rank, or one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDefinition:
    """The traits of a schedule. The rest of the package uses these and never compares names.

    Attributes:
        name: value of `--pipeline-schedule`.
        summary: one sentence for `--help`.
        actions: yields the actions of one stage.
        delays: (stages, stage) -> gradient delay of each chunk, in updates.
        chunks: virtual stages per rank.
        norm_scope: parameters that one gradient norm clips.
        least_microbatches: stages -> fewest micro-batches per batch when batches overlap.
        untaken_sends: stages -> most messages per direction that the neighbor has not received yet when a stage sends
            the next one.
        posts_ahead: stages -> whether a neighbor can send its next message without the forward or backward that takes
            the message before it, in steady state: its receive may then be posted before that one.
        update_per_microbatch: whether every micro-batch is a batch of its own.
        tied_embeddings: whether input embedding and output layer may share their weight.
        megatron: whether Megatron-Core's own schedule function runs it.
        unsupported: refused features (keys of `config.validate`) with the reasons.
    """

    name: str
    summary: str
    actions: Callable[[Segment], Iterator[Action]]
    delays: Callable[[int, int], tuple[int, ...]]
    chunks: int = 1
    norm_scope: NormScope = "model"
    least_microbatches: Callable[[int], int] = lambda stages: 1
    untaken_sends: Callable[[int], int] = lambda stages: 2
    posts_ahead: Callable[[int], bool] = lambda stages: True
    update_per_microbatch: bool = False
    tied_embeddings: bool = True
    megatron: bool = False
    unsupported: Mapping[str, str] = field(default_factory=dict)

    @property
    def delayed(self) -> bool:
        """Whether any gradient is delayed."""
        return any(delay for stage in range(self.chunks + 1) for delay in self.delays(self.chunks + 1, stage))

    def plan(
        self,
        *,
        stages: int,
        stage: int,
        microbatches: int,
        batches: int,
        first_batch: int = 0,
        versions: VersionRule | None = None,
    ) -> Iterator[Action]:
        """The actions of one stage in batches first_batch .. first_batch + batches - 1, planned lazily.

        The pipe is empty before and after. A single batch may have any number of micro-batches where a rank holds one
        chunk. `versions` replaces the rule of weight versions of chunk 0.

        Raises:
            ValueError: numbers out of range, or overlapping batches with too few micro-batches.
        """
        problems = _shape_problems(stages, microbatches, batches, first_batch, stage)
        if not problems and (batches > 1 or self.chunks > 1):
            problems = self.overlap_problems(stages=stages, microbatches=microbatches)
        if problems:
            raise ValueError("; ".join(problems))
        rule = versions or self.version_rules(stages, stage)[0]
        return self.actions(Segment(stages, stage, microbatches, range(first_batch, first_batch + batches), rule))

    def overlap_problems(self, *, stages: int, microbatches: int) -> list[str]:
        """Problems with overlapping batches of this size.

        With fewer micro-batches than stage 0 has in flight, a third weight version would be needed (PipeDream-2BW,
        arXiv 2006.09503).
        """
        least = self.least_microbatches(stages)
        if microbatches >= least:
            return []
        return [
            f"schedule {self.name} needs at least {least} micro-batches per batch, got {microbatches} micro-batches and"
            f" {stages} stages: raise the global batch size, lower the micro-batch size or the data-parallel size, or"
            " use fewer stages"
        ]

    def layer_delays(self, stages: int) -> tuple[int, ...]:
        """Delay of each virtual stage, in the order of the layers."""
        return tuple(self.delays(stages, stage)[chunk] for chunk in range(self.chunks) for stage in range(stages))

    def version_rules(self, stages: int, stage: int) -> tuple[VersionRule, ...]:
        return tuple(stale_versions(delay) for delay in self.delays(stages, stage))

    def version_limits(self, stages: int, stage: int) -> tuple[int, ...]:
        """Most weight versions alive at once, of each chunk."""
        return tuple(delay + 1 for delay in self.delays(stages, stage))


def _two_bw(name: str, summary: str, *, lead: int) -> ScheduleDefinition:
    """2BW in which each stage runs `lead` more forwards ahead than the next one."""
    return ScheduleDefinition(
        name=name,
        summary=summary,
        actions=partial(two_bw.two_bw, lead=lead),
        delays=lambda stages, stage: (1,),
        least_microbatches=partial(two_bw.least_microbatches, lead=lead),
        untaken_sends=lambda stages: lead + 1,
    )


SCHEDULES: dict[str, ScheduleDefinition] = {
    definition.name: definition
    for definition in (
        ScheduleDefinition(
            name="1f1b",
            summary="Megatron-Core's own; a bubble in every batch",
            actions=two_bw.one_f_one_b,
            delays=lambda stages, stage: (0,),
            megatron=True,
        ),
        _two_bw("2bw", "no bubble; gradients one step old", lead=1),
        ScheduleDefinition(
            name="wpipe",
            summary="no bubble; gradients one step old in the first half of the layers only",
            chunks=2,
            actions=wpipe.wpipe,
            delays=lambda stages, stage: (1, 0),
            norm_scope="chunk",
            least_microbatches=lambda stages: stages,
            # What comes round lies up to P - 1 slots.
            untaken_sends=lambda stages: stages,
            # On 2 stages a forward of chunk 0 on rank 1 directly precedes that of chunk 1 on rank 0.
            posts_ahead=lambda stages: stages > 2,
            tied_embeddings=False,
        ),
        ScheduleDefinition(
            name="pipedream",
            summary="the original PipeDream: an update after each micro-batch, gradients P-1-s steps old on stage s",
            actions=pipedream.pipedream,
            delays=lambda stages, stage: (stages - 1 - stage,),
            norm_scope="stage",
            update_per_microbatch=True,
            tied_embeddings=False,
            unsupported={
                "experts": "untested; use a dense model",
                "distributed optimizer": "untested; leave it out",
                "per-token loss": "an update follows every micro-batch, before the batch's number of tokens is known; "
                "leave it out",
            },
        ),
        _two_bw("2bw-eager", "2bw that hides transfers between stages, for nearly twice the activations", lead=2),
    )
}


def register(definition: ScheduleDefinition) -> None:
    """Make a schedule available to the command line and the tools.

    Raises:
        ValueError: the name is taken.
    """
    if definition.name in SCHEDULES:
        raise ValueError(f"schedule {definition.name!r} is already registered")
    SCHEDULES[definition.name] = definition


def schedule_problems(name: str, *, stages: int, microbatches: int, batches: int, first_batch: int = 0) -> list[str]:
    """Problems with a table of this shape; none if `make_schedule` accepts it."""
    problems = _shape_problems(stages, microbatches, batches, first_batch)
    if name not in SCHEDULES:
        return [f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}", *problems]
    if not problems:
        problems += SCHEDULES[name].overlap_problems(stages=stages, microbatches=microbatches)
    return problems


def _shape_problems(stages: int, microbatches: int, batches: int, first_batch: int, stage: int = 0) -> list[str]:
    counts = {"stages": stages, "microbatches": microbatches, "batches": batches}
    problems = [f"{name} = {value}: must be at least 1" for name, value in counts.items() if value < 1]
    if first_batch < 0:
        problems.append(f"first_batch = {first_batch}: must be at least 0")
    if not 0 <= stage < max(1, stages):
        problems.append(f"stage = {stage}: must be one of 0 .. {stages - 1}")
    return problems


def make_schedule(
    name: str,
    stages: int,
    microbatches: int,
    batches: int,
    *,
    first_batch: int = 0,
    versions: VersionRule | None = None,
) -> Schedule:
    """The complete table of one segment. Arguments as of `Schedule`; `versions` as in `ScheduleDefinition.plan`.

    Raises:
        ValueError: lists all problems with the numbers.
    """
    shape = {"stages": stages, "microbatches": microbatches, "batches": batches, "first_batch": first_batch}
    if problems := schedule_problems(name, **shape):
        raise ValueError("; ".join(problems))
    definition = SCHEDULES[name]
    rules = [definition.version_rules(stages, rank) for rank in range(stages)]
    if versions is not None:
        rules = [(versions, *own[1:]) for own in rules]
    return Schedule(
        name=name,
        **shape,
        chunks=definition.chunks,
        actions=tuple(tuple(definition.plan(**shape, stage=rank, versions=versions)) for rank in range(stages)),
        versions=tuple(rules),
        version_limits=tuple(definition.version_limits(stages, rank) for rank in range(stages)),
        microbatches_per_update=1 if definition.update_per_microbatch else microbatches,
        reduction_across_ranks=definition.norm_scope != "stage",
    )
