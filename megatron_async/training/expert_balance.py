# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""How evenly the tokens of every batch are spread over the experts, layer by layer.

Routers report while they compute, and micro-batches of several batches are in flight, so what is reported belongs to
the batch that is computed at that moment. With recomputation Megatron's routers report during backward, and so does
the count here: only where autograd records, which is once for every micro-batch. Sums over all ranks travel in the
background.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.router import TopKRouter

from megatron_async.mcore.model import moe_layer_pattern, use_router_loss_tracker
from megatron_async.mcore.parallel import device
from megatron_async.pipeline.groups import group_of_all
from megatron_async.platform.host import ReducedValues
from megatron_async.training.callbacks import Callback, CompletedBatch

# --moe-router-load-balancing-type, and the name under which Megatron's routers report the loss.
_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def router_losses(config: Any) -> list[str]:
    """Names of the losses that the routers of a model add, in the metrics file and in Megatron's log."""
    kinds, strengths = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, strengths = [kinds], [strengths]
    names = [_LOSSES[kind] for kind, strength in zip(kinds, strengths, strict=True) if kind in _LOSSES and strength]
    return [*names, "z_loss"] if config.moe_z_loss_coeff else names


class PendingBalance:
    """The balance of one batch, on its way over all ranks.

    Args:
        sums: [layers x (losses + experts)], row by row: mean losses of the layer, then tokens of each expert.
        layers: numbers of the layers with experts, from 1.
        losses: names.
    """

    def __init__(self, sums: ReducedValues, layers: Sequence[int], losses: Sequence[str]) -> None:
        self._sums, self._layers, self._losses = sums, layers, losses

    @property
    def ready(self) -> bool:
        return self._sums.ready

    @property
    def tokens(self) -> list[list[float]]:
        """Tokens of each expert, layer by layer."""
        values, width = self._sums.read(), len(self._sums.read()) // len(self._layers)
        return [values[row * width + len(self._losses) : (row + 1) * width] for row in range(len(self._layers))]

    def read(self) -> dict[str, Any]:
        """Each loss as its mean over the layers, `expert_imbalance` of the worst layer, `idle_experts` of all layers;
        the same by layer in `moe_layers`."""
        values = self._sums.read()
        width = len(values) // len(self._layers)
        layers = {
            str(layer): self._layer(values[row * width : (row + 1) * width]) for row, layer in enumerate(self._layers)
        }
        means = {name: sum(layer[name] for layer in layers.values()) / len(layers) for name in self._losses}
        return {
            **means,
            "expert_imbalance": max(layer["expert_imbalance"] for layer in layers.values()),
            "idle_experts": sum(layer["idle_experts"] for layer in layers.values()),
            "moe_layers": layers,
        }

    def _layer(self, values: Sequence[float]) -> dict[str, float]:
        tokens = values[len(self._losses) :]
        return {
            **dict(zip(self._losses, values, strict=False)),
            "expert_imbalance": max(tokens) * len(tokens) / sum(tokens) if any(tokens) else float("nan"),
            "idle_experts": tokens.count(0.0),
        }


class ExpertBalance(Callback):
    """Collects what the routers of this rank report, by batch; takes the place of Megatron's tracker of such losses.

    Args:
        model: this rank's model chunks.
        layers: numbers of all layers with experts, from 1; the same on every rank, as all that follows.
        losses: see `router_losses`.
        experts: number of experts in a layer.
        group: process group of its own, over all ranks; None for a single process.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        *,
        layers: Sequence[int],
        losses: Sequence[str],
        experts: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._layers, self._losses, self._group = tuple(layers), tuple(losses), group
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._shape = len(layers), len(losses) + experts
        self._sums: dict[int, torch.Tensor] = {}
        self._now: torch.Tensor | None = None
        for module in (module for chunk in model for module in chunk.modules()):
            if isinstance(module, TopKRouter) and not module.is_mtp_layer:
                module.register_forward_hook(self._count)
        use_router_loss_tracker(self)

    def on_action(self, kind: str, batch: int) -> None:
        if kind in "FB":
            self.use(batch)

    def on_batch_end(self, batch: CompletedBatch) -> None:
        batch.pending.append(self.reduce(batch.number))

    def use(self, batch: int) -> None:
        """What is reported from now on belongs to `batch`."""
        if batch not in self._sums:
            self._sums[batch] = torch.zeros(self._shape, dtype=torch.float64, device=device())
        self._now = self._sums[batch]

    def record(
        self,
        name: str,
        value: torch.Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: dist.ProcessGroup | None = None,
        avg_group: dist.ProcessGroup | None = None,
        needs_dp_avg: bool = True,
    ) -> None:
        """Megatron's routers call this once for each micro-batch and loss; the arguments are those of its tracker.

        Megatron sums over `reduce_group`, then averages over `avg_group` and the data-parallel ranks. Every report
        has its weight here instead, so that one sum over all ranks gives the mean over the batch.
        """
        row = self._rows.get(layer_number or 0)
        if self._now is None or row is None or name not in self._losses:
            return
        reports = get_num_microbatches()
        if avg_group is not None:
            reports *= avg_group.size()
        elif needs_dp_avg:
            reports *= mpu.get_data_parallel_world_size()
        self._now[row, self._losses.index(name)] += value.detach() / reports

    def reduce(self, batch: int) -> PendingBalance:
        """Sum over all ranks what was reported for a completed batch, without waiting. Collective."""
        self.use(batch)
        sums, self._now = self._sums.pop(batch).view(-1), None
        work = dist.all_reduce(sums, group=self._group, async_op=True) if self._group is not None else None
        return PendingBalance(ReducedValues(sums, work), self._layers, self._losses)

    def _count(self, router: TopKRouter, inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """After a router's forward: outputs are weights and choices, [tokens, experts] both."""
        if self._now is None or not (router.training and torch.is_grad_enabled()):
            return
        weights, choices = outputs
        if router.config.moe_pad_expert_input_to_capacity:
            choices = choices & (weights != 0)  # the rest fills every expert up to its capacity
        self._now[self._rows[router.layer_number], len(self._losses) :] += choices.sum(dim=0)


def make(config: Any, model: Sequence[torch.nn.Module]) -> ExpertBalance | None:
    """The balance of a model's experts; None where it has none. Collective.

    CUDA graphs replay what they have captured, whichever batch is computed, so nothing is collected with them.
    """
    if config.num_moe_experts is None or config.cuda_graph_impl != "none":
        return None
    return ExpertBalance(
        model,
        layers=[number for number, has in enumerate(moe_layer_pattern(config), start=1) if has],
        losses=router_losses(config),
        experts=config.num_moe_experts,
        group=group_of_all("expert balance"),
    )
