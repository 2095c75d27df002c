# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The schedules by the names that users give."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megatron_async.schedules import pipedream, two_bw, wpipe
from megatron_async.schedules.actions import Action, Schedule, VersionRule, stale_versions
from megatron_async.schedules.segment import Segment, overlap_problems, raise_problems, shape_problems

NormScope = Literal["model", "chunk", "stage"]
"""Parameters whose gradients are clipped by one norm: the whole model, a chunk of every rank (half of the layers with
two chunks), or a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDefinition:
    """The traits of a schedule. The rest of the package asks for these and never for a name.

    Attributes:
        name: value of `--pipeline-schedule`.
        summary: one sentence for `--help`.
        actions: the lazy plan of one stage.
        delays: (stages, stage) -> gradient delay in updates of each chunk of that stage. The one place that says so.
        chunks: virtual stages per rank.
        norm_scope: which gradients one norm clips.
        least_microbatches: stages -> fewest micro-batches of a batch that may overlap with the next one.
        untaken_sends: stages -> messages of one direction that may be on their way when a stage sends the next one:
            the table proves that the neighbor has taken all earlier ones.
        update_per_microbatch: whether every micro-batch is a batch of its own.
        tied_embeddings: whether input embedding and output head may share one weight.
        megatron: whether Megatron-Core's own schedule function runs it.
        unsupported: features (keys of `config.validate`) that are refused with it, each with the reason.
    """

    name: str
    summary: str
    actions: Callable[[Segment], Iterator[Action]]
    delays: Callable[[int, int], tuple[int, ...]]
    chunks: int = 1
    norm_scope: NormScope = "model"
    least_microbatches: Callable[[int], int] = lambda stages: 1
    untaken_sends: Callable[[int], int] = lambda stages: 2
    update_per_microbatch: bool = False
    tied_embeddings: bool = True
    megatron: bool = False
    unsupported: Mapping[str, str] = field(default_factory=dict)

    @property
    def delayed(self) -> bool:
        """Whether some gradient is taken at older weights than it updates."""
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

        The pipe is empty before and after. A single batch overlaps with no other and may have any number of
        micro-batches.

        Args:
            versions: rule of weight versions of chunk 0; None for the schedule's own.

        Raises:
            ValueError: numbers out of range, or several batches of too few micro-batches.
        """
        problems = shape_problems(
            stages=stages, microbatches=microbatches, batches=batches, first_batch=first_batch, stage=stage
        )
        if not problems and batches > 1:
            problems = self.overlap_problems(stages=stages, microbatches=microbatches)
        raise_problems(problems)
        rule = versions or self.version_rules(stages, stage)[0]
        return self.actions(Segment(stages, stage, microbatches, range(first_batch, first_batch + batches), rule))

    def overlap_problems(self, *, stages: int, microbatches: int) -> list[str]:
        """Problems with batches of so many micro-batches where several follow one another."""
        least = self.least_microbatches(stages)
        return overlap_problems(name=self.name, stages=stages, microbatches=microbatches, least=least)

    def layer_delays(self, stages: int) -> tuple[int, ...]:
        """Delay of each virtual stage, in the order of the model's layers."""
        return tuple(self.delays(stages, stage)[chunk] for chunk in range(self.chunks) for stage in range(stages))

    def version_rules(self, stages: int, stage: int) -> tuple[VersionRule, ...]:
        """Rule of weight versions of each chunk."""
        return tuple(stale_versions(delay) for delay in self.delays(stages, stage))

    def version_limits(self, stages: int, stage: int) -> tuple[int, ...]:
        """Weight versions of each chunk that may be alive at once."""
        return tuple(delay + 1 for delay in self.delays(stages, stage))

    def weight_copies(self, stages: int, stage: int) -> float:
        """Most weights that a rank holds, in units of its own; chunks are of one size."""
        return sum(self.version_limits(stages, stage)) / self.chunks


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


SCHEDULES: dict[str, ScheduleDefinition] = {}
"""Every schedule by its name."""


def register(definition: ScheduleDefinition) -> None:
    """Make a schedule available under its name, to the command line and to every tool.

    Raises:
        ValueError: the name is taken.
    """
    if definition.name in SCHEDULES:
        raise ValueError(f"schedule {definition.name!r} is registered already")
    SCHEDULES[definition.name] = definition


register(
    ScheduleDefinition(
        name="1f1b",
        summary="Megatron-Core's own; a bubble in every batch",
        actions=two_bw.one_f_one_b,
        delays=lambda stages, stage: (0,),
        megatron=True,
    )
)
register(_two_bw("2bw", "no bubble; gradients one step old", lead=1))
register(
    ScheduleDefinition(
        name="wpipe",
        summary="no bubble; gradients one step old in the first half of the layers only",
        chunks=2,
        actions=wpipe.wpipe,
        delays=lambda stages, stage: (1, 0),
        norm_scope="chunk",
        least_microbatches=lambda stages: stages,
        # Ranks run up to 2P forwards ahead of their backwards.
        untaken_sends=lambda stages: 2 * stages,
        tied_embeddings=False,
    )
)
register(
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
    )
)
register(_two_bw("2bw-eager", "2bw that hides transfers between stages, for nearly twice the activations", lead=2))


def schedule_problems(name: str, *, stages: int, microbatches: int, batches: int, first_batch: int = 0) -> list[str]:
    """Everything that forbids a table of this shape; empty when `make_schedule` accepts it."""
    problems = shape_problems(stages=stages, microbatches=microbatches, batches=batches, first_batch=first_batch)
    if name not in SCHEDULES:
        return [f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}", *problems]
    if not problems:
        problems += SCHEDULES[name].overlap_problems(stages=stages, microbatches=microbatches)
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
    """The complete table of one segment.

    Args:
        name: one of `SCHEDULES`.
        stages: number P of pipeline ranks.
        microbatches: number M of micro-batches per batch.
        batches: number of batches in the segment.
        first_batch: number of the first of them.
        versions: rule of versions in place of the schedule's own; for wpipe that of chunk 0.

    Raises:
        ValueError: lists everything that is wrong with the numbers.
    """
    raise_problems(
        schedule_problems(name, stages=stages, microbatches=microbatches, batches=batches, first_batch=first_batch)
    )
    definition = SCHEDULES[name]
    rules = [definition.version_rules(stages, rank) for rank in range(stages)]
    if versions is not None:
        rules = [(versions, *own[1:]) for own in rules]
    return Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        batches=batches,
        first_batch=first_batch,
        chunks=definition.chunks,
        actions=tuple(
            tuple(
                definition.plan(
                    stages=stages,
                    stage=rank,
                    microbatches=microbatches,
                    batches=batches,
                    first_batch=first_batch,
                    versions=rules[rank][0],
                )
            )
            for rank in range(stages)
        ),
        versions=tuple(rules),
        version_limits=tuple(definition.version_limits(stages, rank) for rank in range(stages)),
        microbatches_per_update=1 if definition.update_per_microbatch else microbatches,
        reduction_across_ranks=definition.norm_scope != "stage",
    )
