# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Expert balance: tokens of each expert and losses of each router, by batch and layer.

Micro-batches of several batches are in flight, so reports count for the batch that is being computed. Tokens are
counted where autograd records: once per micro-batch, in the backward pass with recomputation, as in Megatron.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter

from megatron_async.mcore.parallel import device
from megatron_async.models import hybrid
from megatron_async.models.naming import layer_number as number_of
from megatron_async.platform.groups import group_of_all
from megatron_async.platform.host import Reduced
from megatron_async.training.callbacks import Callback, CompletedBatch

# --moe-router-load-balancing-type -> name of the loss in Megatron.
_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def router_losses(config: Any) -> list[str]:
    """Names of the router losses of a model, as in Megatron's log."""
    kinds, strengths = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, strengths = [kinds], [strengths]
    names = [_LOSSES[kind] for kind, strength in zip(kinds, strengths, strict=True) if kind in _LOSSES and strength]
    return [*names, "z_loss"] if config.moe_z_loss_coeff else names


def balance(layers: Sequence[int], losses: Sequence[str], sums: list[float]) -> dict[str, Any]:
    """The values of a batch: means of the losses over the layers, the largest `expert_imbalance`, the sum of
    `idle_experts`, and all of them by layer as `moe_layers`.

    Args:
        layers: numbers of the layers with experts, from 1.
        losses: names.
        sums: [layers x (losses + experts)], flat: per layer the mean of each loss and the tokens of each expert.
    """
    rows = {}
    for layer, row in zip(layers, batched(sums, len(sums) // len(layers)), strict=True):
        tokens = row[len(losses) :]
        rows[str(layer)] = {
            **dict(zip(losses, row, strict=False)),
            "expert_imbalance": max(tokens) * len(tokens) / sum(tokens) if any(tokens) else float("nan"),
            "idle_experts": tokens.count(0.0),
        }
    return {
        **{name: sum(row[name] for row in rows.values()) / len(rows) for name in losses},
        "expert_imbalance": max(row["expert_imbalance"] for row in rows.values()),
        "idle_experts": sum(row["idle_experts"] for row in rows.values()),
        "moe_layers": rows,
    }


class ExpertBalance(Callback):
    """Collects the reports of this rank's routers by batch. Replaces Megatron's tracker of router losses. Collective.

    Args:
        args: Megatron's arguments.
        config: of the model.
        model: this rank's model chunks.
    """

    def __init__(self, args: argparse.Namespace, config: Any, model: Sequence[torch.nn.Module]) -> None:
        letters = enumerate(hybrid.letters_of(args), start=1)
        self._layers = [number for number, letter in letters if Symbols.MOE in letter]
        self._losses = router_losses(config)
        self._group = group_of_all("expert balance")
        self._rows: dict[int | None, int] = {}  # by Megatron's number
        self._shape = len(self._layers), len(self._losses) + config.num_moe_experts
        self._sums: dict[int, torch.Tensor] = {}
        self._now: torch.Tensor | None = None
        for module in (module for chunk in model for module in chunk.modules()):
            if isinstance(module, TopKRouter) and not module.is_mtp_layer:
                self._rows[module.layer_number] = self._layers.index(number_of(module))
                module.register_forward_hook(self._count)
        set_moe_metrics_tracker(self)

    def on_action(self, kind: str, batch: int) -> None:
        """Count the following reports for `batch`."""
        if kind in "FB":
            self._now = self._sums_of(batch)

    def on_batch_end(self, batch: CompletedBatch) -> None:
        sums, self._now = self._sums_of(batch.number).view(-1), None
        del self._sums[batch.number]
        batch.pending.append(Reduced(sums, self._group, partial(balance, self._layers, self._losses)))

    def _sums_of(self, batch: int) -> torch.Tensor:
        if batch not in self._sums:
            self._sums[batch] = torch.zeros(self._shape, dtype=torch.float64, device=device())
        return self._sums[batch]

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
        """Megatron's routers call this per micro-batch and loss, with the arguments of Megatron's tracker.

        Megatron sums over `reduce_group`, then averages over `avg_group` and the data-parallel ranks. Here reports are
        weighted, so that one sum over all ranks gives the mean over the batch.
        """
        row = self._rows.get(layer_number)
        if self._now is None or row is None or name not in self._losses:
            return
        reports = get_num_microbatches()
        if avg_group is not None:
            reports *= avg_group.size()
        elif needs_dp_avg:
            reports *= mpu.get_data_parallel_world_size()
        self._now[row, self._losses.index(name)] += value.detach() / reports

    def _count(self, router: TopKRouter, inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        """After a router's forward: outputs are weights and choices, [tokens, experts] both."""
        if self._now is None or not (router.training and torch.is_grad_enabled()):
            return
        weights, choices = outputs
        if router.config.moe_pad_expert_input_to_capacity:
            choices = choices & (weights != 0)  # without padding
        self._now[self._rows[router.layer_number], len(self._losses) :] += choices.sum(dim=0)
