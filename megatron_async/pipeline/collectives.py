# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The collectives of an update: gradients over data-parallel ranks, tied embeddings, the squared norm over all stages.

Their start may depend on the progress of a rank, so it comes at moments that differ between ranks. The norm has process
groups of its own for each chunk, in the order of the batches: values of two batches or chunks must not be added to each
other.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.mcore.model import tied_embedding
from megatron_async.mcore.optimizer import gathering_buckets, norm_groups
from megatron_async.mcore.parallel import device
from megatron_async.pipeline.accumulators import Accumulators
from megatron_async.pipeline.decision import Decision, UpdateRule, decide
from megatron_async.pipeline.gradients import FlatGradients
from megatron_async.pipeline.reduction import Steps
from megatron_async.platform.groups import GroupKey, make_groups
from megatron_async.platform.host import HostValues, Reduced, to_device


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over ranks of one batch.

    Attributes:
        rule: scaling and clipping.
        squares: sum of squares of each norm group, [groups], float64.
        shared: number of tokens, then the values shared by all ranks, float64; empty with `UpdateRule.lag`.
        on_host: both, on their way to the host.
        late: the values shared by all ranks `UpdateRule.lag` updates ago.
    """

    rule: UpdateRule
    squares: torch.Tensor
    shared: torch.Tensor
    on_host: HostValues
    late: HostValues | None

    @property
    def decision(self) -> Decision:
        """The decision on the device."""
        return decide(self.squares.unbind(), self.shared[0] if len(self.shared) else None, self.rule)

    def read(self) -> tuple[Decision, tuple[float, ...]]:
        """The decision on the host, and the shared values. Waits for them."""
        values = torch.tensor(self.on_host.read(), dtype=torch.float64)
        squares, shared = values.split([len(self.squares), len(self.shared)])
        decision = decide(squares.unbind(), shared[0] if len(shared) else None, self.rule)
        return decision, tuple((shared.tolist() if self.late is None else self.late.read())[1:])


class UpdateCollectives:
    """The collectives of the updates of one model chunk. Making it is collective over all ranks of the job.

    Args: as of `DeferredUpdate`.
    """

    def __init__(
        self, index: int, chunk: Any, optimizer: MegatronOptimizer, accumulators: Accumulators, rule: UpdateRule
    ) -> None:
        self._optimizer, self._accumulators = optimizer, accumulators
        tied = tied_embedding(chunk)
        self._rule, self._tied_embedding = rule, tied if tied is not None and tied.requires_grad else None
        self._members = [
            (inner, mpu.get_tensor_model_parallel_group() if rule.stage_norm else group)
            for inner, group in norm_groups(optimizer)
        ]
        # Where nothing is trained no optimizer has a norm.
        stage = mpu.get_tensor_model_parallel_group()
        self._groups = list(dict.fromkeys(group for _, group in self._members)) or [stage]
        gathering = gathering_buckets(chunk)
        like = [*self._groups, None, *(buckets.intra_distributed_optimizer_instance_group for buckets in gathering)]
        ranks = [tuple(dist.get_process_group_ranks(group)) for group in like]
        keys = [GroupKey(f"update of chunk {index}, part {part}", members) for part, members in enumerate(ranks)]
        own = make_groups(keys)
        self._norm_groups, self._everyone = own[: len(self._groups)], own[len(self._groups)]
        for buckets, group in zip(gathering, own[len(self._groups) + 1 :], strict=True):
            buckets.intra_distributed_optimizer_instance_group = group
        self._sums: dict[int, Sums] = {}
        self._late: dict[int, Reduced[list[float]]] = {}

    def take(self, batch: int) -> Sums:
        """The sums of `batch`, once; its steps are at their end."""
        return self._sums.pop(batch)

    def known(self, batch: int) -> bool:
        """Whether the host can read the sums of `batch` without waiting."""
        return batch in self._sums and self._sums[batch].on_host.ready

    def steps(self, batch: int, tokens: torch.Tensor | None, shared: Sequence[float]) -> Steps:
        """The collectives of a batch whose gradients are complete. Arguments as of `DeferredUpdate.start`."""
        yield [
            *self._accumulators.reduce_counts(batch),
            *(work for flat in self._accumulators.gradients.flat(batch) for work in self._reduce_buffer(flat)),
        ]
        if self._tied_embedding is not None:
            yield [self._reduce_tied_embedding(batch)]
        squares = self._local_squares(batch)
        own = to_device([0.0, *shared], device())
        if tokens is not None and mpu.get_tensor_model_parallel_rank() == 0:
            own[0] = tokens
        parts, late = [*zip(self._norm_groups, squares, strict=True)], None
        if lag := self._rule.lag:
            self._late[batch] = Reduced(own, self._everyone, list)
        else:
            parts.append((self._everyone, own))
        works, sums = _sum(parts)
        yield works
        if lag and (before := self._late.pop(batch - lag, None)) is not None:
            late = before.fetch()  # every rank has contributed by now
        values = torch.cat(sums)
        count = len(self._groups)
        self._sums[batch] = Sums(self._rule, values[:count], values[count:], HostValues(values), late)

    @staticmethod
    def _reduce_buffer(flat: FlatGradients) -> list[dist.Work | None]:
        buffer = flat.buffer
        group, ranks = buffer.data_parallel_group, buffer.data_parallel_world_size
        # With --ddp-average-in-collective Megatron leaves the division to an average, which gloo does not have.
        scale = buffer.gradient_scaling_factor / (ranks if buffer.ddp_config.average_in_collective else 1)
        if scale != 1.0:
            flat.data.mul_(scale)
        if ranks == 1:
            return []
        if not buffer.ddp_config.use_distributed_optimizer:
            return [dist.all_reduce(flat.data, group=group, async_op=True)]
        return [
            dist.reduce_scatter_tensor(bucket.chunk(ranks)[group.rank()], bucket, group=group, async_op=True)
            for bucket in flat.buckets
        ]

    def _reduce_tied_embedding(self, batch: int) -> dist.Work | None:
        """The embedding on the first stage and the head on the last one are one weight: sum their gradients."""
        with self._accumulators.gradients.reading(batch):
            gradient = self._tied_embedding.main_grad  # type: ignore[union-attr]
        return dist.all_reduce(gradient, group=mpu.get_embedding_group(), async_op=True)

    def _local_squares(self, batch: int) -> list[torch.Tensor]:
        """Sum of squares of this rank's gradients, a float64 tensor of one element for each norm group."""
        parts: dict[dist.ProcessGroup | None, list[torch.Tensor]] = defaultdict(list)
        with self._accumulators.gradients.reading(batch):
            self._optimizer.prepare_grads()
            for inner, group in self._members:
                parts[group] += inner.get_grads_for_grad_norm()
            squares = [_sum_of_squares(parts[group]) for group in self._groups]
            # A parameter's .grad must be empty while backward passes run: autograd would add to it in place.
            self._optimizer.zero_grad()
        return squares


def _sum(parts: Sequence[tuple[dist.ProcessGroup, torch.Tensor]]) -> tuple[list[dist.Work], list[torch.Tensor]]:
    """Start one sum for each group, since small ones cost the same as large ones.

    Returns:
        The handles, and for each part a 1-D tensor that will hold its sum over its group.
    """
    works, sums = [], [part for _, part in parts]
    for group in dict.fromkeys(group for group, _ in parts):
        places = [place for place, (other, _) in enumerate(parts) if other is group]
        together = torch.cat([sums[place] for place in places])
        works.append(dist.all_reduce(together, group=group, async_op=True))
        for place, total in zip(places, together.split([len(sums[place]) for place in places]), strict=True):
            sums[place] = total
    return works, sums


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        return torch.zeros(1, dtype=torch.float64, device=device())
    return torch.stack(list(torch._foreach_norm(gradients))).double().square().sum().view(1)
