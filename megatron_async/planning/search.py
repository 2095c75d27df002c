# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every sensible layout of a run on a number of devices, with balanced stages, the fastest first."""

import argparse
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_async.models import rules
from megatron_async.planning.balance import RECOMPUTE, Choice, NoSplit, choose, split_option, variant
from megatron_async.planning.costs import CostModel
from megatron_async.planning.devices import Device
from megatron_async.planning.parameters import Block, blocks, distributed
from megatron_async.planning.resolve import key_value_heads, microbatches_of, pad_vocabulary
from megatron_async.planning.split import on_ranks
from megatron_async.planning.timing import BatchTime, BlockTime, Exchange, batch_time
from megatron_async.schedules import SCHEDULES, ScheduleDefinition

SIMULATED = 6
"""Layouts of each schedule that are simulated, after all were ordered by a formula."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a plan chooses. `data` follows from the number of devices."""

    schedule: str
    pipeline: int
    tensor: int
    expert: int
    data: int
    micro_batch: int
    recompute: bool

    def __str__(self) -> str:
        text = f"{self.schedule}, PP x TP x EP x DP {self.sizes}, micro-batches of {self.micro_batch}"
        return f"{text}{', full recomputation' if self.recompute else ''}"

    @property
    def sizes(self) -> str:
        """Pipeline x tensor x expert x data parallel size."""
        return f"{self.pipeline} x {self.tensor} x {self.expert} x {self.data}"

    def words(self, split: Sequence[str]) -> list[str]:
        """Its options on the command line; `split`: option and value."""
        words = ["--pipeline-schedule", self.schedule, "--micro-batch-size", str(self.micro_batch)]
        words += ["--pipeline-model-parallel-size", str(self.pipeline)]
        words += ["--tensor-model-parallel-size", str(self.tensor), *(["--sequence-parallel"] * (self.tensor > 1))]
        words += ["--expert-model-parallel-size", str(self.expert)] if self.expert > 1 else []
        words += split if self.pipeline > 1 else []
        return words + (RECOMPUTE.split() if self.recompute else [])


@dataclass(frozen=True, slots=True)
class Outcome:
    """A layout with its balanced split as option and value, the bytes of the fullest device, and its time."""

    devices: int
    layout: Layout
    split: tuple[str, str]
    bytes: int
    time: BatchTime


class Search:
    """Layouts of a run.

    Args:
        base: checked arguments of the run in one process; `staleness_correction` is that of delayed schedules.
        device: that is planned for.
        micro_batches: micro-batch sizes to try.
        recompute: whether to recompute layers: values to try.
    """

    def __init__(
        self, base: argparse.Namespace, device: Device, micro_batches: Sequence[int], recompute: Sequence[bool]
    ) -> None:
        self._base, self._device = base, device
        self._micro_batches, self._recompute = micro_batches, recompute
        self._models: dict[tuple[int, int], list[Block]] = {}
        self._passes: dict[tuple[int, int, int, bool], list[BlockTime]] = {}
        self._once_a_batch: dict[tuple[int, int, int, int, bool], tuple[list[float], float]] = {}
        self.nearest: tuple[int, Layout] | None = None

    def best(self, devices: int, schedules: Sequence[str], tensor: Sequence[int], pipeline: int) -> list[Outcome]:
        """Layouts that fit the memory, the fastest first; `nearest` is the one that needs least if none does."""
        found: list[Outcome] = []
        for schedule in schedules:
            ordered = heapq.nsmallest(
                8 * SIMULATED,
                ((self._bound(layout), layout) for layout in self._layouts(devices, schedule, tensor, pipeline)),
                key=lambda entry: entry[0],
            )
            fitting = 0
            for _, layout in ordered:
                if fitting < SIMULATED and (outcome := self._outcome(devices, layout)) is not None:
                    found.append(outcome)
                    fitting += 1
        return sorted(found, key=lambda outcome: outcome.time.seconds)

    def nearest_text(self) -> str:
        """Which layout comes nearest to fitting."""
        if self.nearest is None:
            return "No layout divides the devices and the batch: change --global-batch-size or --devices."
        least, layout = self.nearest
        return f"The least is {least / 2**30:.1f} GiB: {layout}."

    def _layouts(self, devices: int, schedule: str, tensors: Sequence[int], largest: int) -> Iterator[Layout]:
        base, definition = self._base, SCHEDULES[schedule]
        experts = [own for own in _divisors(base.num_experts or 1) if own & (own - 1) == 0]
        pipelines = [own for own in _divisors(devices) if own <= min(largest, base.num_layers + 1)]
        for tensor, pipeline in itertools.product(tensors, pipelines):
            if devices % (tensor * pipeline) or (pipeline == 1 and definition.delayed) or not self._divides(tensor):
                continue
            if pipeline * definition.chunks > base.num_layers + 1:
                continue
            data = devices // (tensor * pipeline)
            for expert, micro, recompute in itertools.product(experts, self._micro_batches, self._recompute):
                microbatches, rest = divmod(base.global_batch_size, micro * data)
                if data % expert == 0 and rest == 0 and microbatches >= definition.least_microbatches(pipeline):
                    yield Layout(schedule, pipeline, tensor, expert, data, micro, recompute)

    def _divides(self, tensor: int) -> bool:
        """Whether the model divides among tensor-parallel ranks, its key and value heads too."""
        args = variant(self._base, tensor_model_parallel_size=tensor)
        return key_value_heads(args) % tensor == 0 and not any(rules.divisibility(args))

    def arguments(self, devices: int, layout: Layout) -> argparse.Namespace:
        """The run's arguments with a layout."""
        definition: ScheduleDefinition = SCHEDULES[layout.schedule]
        args = variant(
            self._base,
            world_size=devices,
            tensor_model_parallel_size=layout.tensor,
            sequence_parallel=layout.tensor > 1,
            expert_tensor_parallel_size=layout.tensor,
            tensor_parallel_num_weight_shards=None,
            expert_tensor_parallel_num_weight_shards=None,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            data_parallel_size=layout.data,
            micro_batch_size=layout.micro_batch,
            pipeline_schedule=layout.schedule,
            recompute_granularity="full" if layout.recompute else self._base.recompute_granularity,
            staleness_correction=self._base.staleness_correction if definition.delayed else "none",
            padded_vocab_size=None,
        )
        pad_vocabulary(args)
        return args

    def _model(self, args: argparse.Namespace) -> list[Block]:
        tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
        if (tensor, 0) not in self._models:
            self._models[tensor, 0] = blocks(args)
        if (tensor, expert) not in self._models:
            self._models[tensor, expert] = distributed(self._models[tensor, 0], args.num_experts or 1, expert)
        return self._models[tensor, expert]

    def _costs(self, args: argparse.Namespace, layout: Layout) -> tuple[list[BlockTime], Exchange]:
        """Times of the blocks and of what stages exchange, each part estimated once for the sizes it depends on."""
        costs, model = CostModel(args, self._device), self._model(args)
        of_pass = layout.tensor, layout.expert, layout.micro_batch, layout.recompute
        if of_pass not in self._passes:
            self._passes[of_pass] = costs.passes(model)
        of_batch = layout.tensor, layout.expert, layout.pipeline, layout.data, SCHEDULES[layout.schedule].delayed
        if of_batch not in self._once_a_batch:
            self._once_a_batch[of_batch] = costs.updates(model), costs.reduction(model)
        updates, reduction = self._once_a_batch[of_batch]
        times = [replace(own, update=update) for own, update in zip(self._passes[of_pass], updates, strict=True)]
        return times, Exchange(costs.transfer(), reduction)

    def _bound(self, layout: Layout) -> float:
        """Seconds of a batch with stages as even as the largest block allows, and transfers in the open."""
        args = self.arguments(layout.pipeline * layout.tensor * layout.data, layout)
        times, exchange = self._costs(args, layout)
        delayed = SCHEDULES[layout.schedule].delayed
        slots = microbatches_of(args) + (0 if delayed else layout.pipeline - 1)
        totals = [own.of_batch(slots) for own in times]
        slowest = max(sum(totals) / layout.pipeline, *totals)
        return slowest if delayed else slowest + 2 * slots * exchange.transfer + exchange.reduction

    def _outcome(self, devices: int, layout: Layout) -> Outcome | None:
        args = self.arguments(devices, layout)
        model = self._model(args)
        times, exchange = self._costs(args, layout)
        try:
            chosen: Choice = choose(args, model, times, self._device.memory_bytes, simulations=0)
        except NoSplit as problem:
            if self.nearest is None or problem.least < self.nearest[0]:
                self.nearest = problem.least, layout
            return None
        parts = on_ranks(times, chosen.ends, layout.pipeline)
        time = batch_time(layout.schedule, parts, microbatches_of(args), exchange)
        return Outcome(devices, layout, split_option(args, chosen.ends), chosen.bytes, time)


def _divisors(number: int) -> list[int]:
    return [own for own in range(1, number + 1) if number % own == 0]
