# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""QK-clip, MuonClip's bound on attention logits (Kimi K2, arXiv 2507.20534, section 2.1), for grouped queries too.

S is the largest logit of a head over a batch, tau the threshold and eta = min(1, tau / S). An update ends by scaling

    the keys of a group         by eta_g^(1-alpha)                  eta_g: the smallest eta of the group's heads
    the queries of each head    by min(1, eta / eta_g^(1-alpha))    eta^alpha where a head has keys of its own

so that the head with the largest logit of a group shrinks by eta, and no other head by more than its keys and its own
logits require. (Megatron's own clip scales all queries of a group by eta_g^alpha.) Biases are scaled with their weight.
Values, output gates and the state of optimizers and corrections are not scaled.

In multi-latent attention a head has keys of its own but for their rotary part, which all heads share and which stays:
the rotary part of the head's queries is scaled by eta, the other part by eta^alpha.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_async.mcore.model import softmax_attentions
from megatron_async.mcore.optimizer import flat_parts, master_of
from megatron_async.optim.param_groups import qkv_rows
from megatron_async.optim.step import Piece, StepContext


@dataclass(frozen=True, slots=True)
class ClipRule:
    """Megatron's `--qk-clip-threshold` (tau, above 0) and `--qk-clip-alpha` (the queries' share, between 0 and 1)."""

    threshold: float
    alpha: float


def head_factors(maxima: Tensor, rule: ClipRule) -> tuple[Tensor, Tensor]:
    """Factors of the queries of every head and of the keys of every group; exactly 1 where nothing is clipped.

    Args:
        maxima: largest logits, [..., groups, heads of a group]. A maximum that is not finite clips nothing.
        rule: the threshold and how a clip is shared.

    Returns:
        [..., groups, heads of a group] and [..., groups].
    """
    above = maxima.isfinite() & (maxima > rule.threshold)
    eta = torch.where(above, rule.threshold / maxima, 1.0)
    keys = eta.amin(dim=-1).pow(1 - rule.alpha)
    return (eta / keys.unsqueeze(-1)).clamp(max=1.0), keys


def clipped_rows(config: Any) -> dict[str, list[tuple[str, int]]]:
    """Name of each projection that is clipped -> its rows in a group, block by block: what scales them, and how many.

    In multi-latent attention a head is a group of its own.
    """
    if getattr(config, "multi_latent_attention", False):
        plain, rotary = config.qk_head_dim, config.qk_pos_emb_head_dim
        name = "linear_q_proj" if config.q_lora_rank is None else "linear_q_up_proj"
        keys_and_values = [("keys", plain), ("nothing", config.v_head_dim)]
        return {name: [("queries", plain), ("both", rotary)], "linear_kv_up_proj": keys_and_values}
    queries, *gates, keys, values = qkv_rows(config)
    others = [("nothing", rows) for rows in gates]
    return {"linear_qkv": [("queries", queries), *others, ("keys", keys), ("nothing", values)]}


def row_factors(maxima: Tensor, groups: int, config: Any, rule: ClipRule) -> dict[str, Tensor]:
    """One factor for each row of every projection of `clipped_rows`.

    Args:
        maxima: [layers, heads], the heads of a group one after the other.
        groups: key and value groups.
        config: of the attentions.
        rule: the threshold and how a clip is shared.

    Returns:
        Name -> [layers, rows].
    """
    queries, keys = head_factors(maxima.unflatten(1, (groups, -1)), rule)
    keys = keys.unsqueeze(-1)
    factors = {"queries": queries, "keys": keys, "both": queries * keys, "nothing": torch.ones_like(keys)}

    def spread(kind: str, rows: int) -> Tensor:
        return factors[kind].repeat_interleave(rows // factors[kind].size(-1), dim=-1)

    return {
        name: torch.cat([spread(kind, rows) for kind, rows in blocks], dim=-1).flatten(1)
        for name, blocks in clipped_rows(config).items()
    }


@dataclass(frozen=True, slots=True)
class _Target:
    """A stepped tensor that holds a projection, or a flat range of its elements.

    Attributes:
        projection: its name in an attention.
        layer: position among the softmax attentions.
        columns: of the weight; 1 for a bias.
        start: first element in the flattened projection; None where the tensor has the projection's own shape.
    """

    projection: str
    layer: int
    columns: int
    start: int | None = None

    def factors(self, rows: Mapping[str, Tensor], tensor: Tensor) -> Tensor:
        """Factors of all projections' rows -> those of the tensor's elements, in a shape that broadcasts to it."""
        own = rows[self.projection][self.layer]
        if self.start is None:
            return own.view(-1, *[1] * (tensor.ndim - 1))
        first, last = self.start // self.columns, (self.start + tensor.numel() - 1) // self.columns
        offset = self.start - first * self.columns
        spread = own[first : last + 1].repeat_interleave(self.columns)
        return spread[offset : offset + tensor.numel()].view_as(tensor)


class QkClip:
    """The last part of an optimizer step: clips query and key projections by the logits of the batch.

    Args:
        chunks: the optimizer's model chunks.
        optimizer: Megatron's.
        rule: the threshold and how a clip is shared.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: MegatronOptimizer, rule: ClipRule) -> None:
        self._attentions, self._rule = softmax_attentions(chunks), rule
        self._targets = _targets(self._attentions, optimizer)
        self._context: StepContext | None = None
        self._factors: Mapping[str, Tensor] | None = None

    def __call__(self, piece: Piece, context: StepContext) -> None:
        """Part of a step, after the correction. Parameters without a gradient were skipped and stay."""
        if context is not self._context:
            self._context, self._factors = context, self._of(context.logits)
        if self._factors is None:
            return
        for param in piece.params:
            target = self._targets.get(id(param))
            stepped = param.grad is not None or getattr(param, "decoupled_grad", None) is not None
            if target is not None and stepped:
                param.detach().mul_(target.factors(self._factors, param))

    def _of(self, maxima: Tensor | None) -> Mapping[str, Tensor] | None:
        if maxima is None or not maxima.numel():
            return None
        attention = self._attentions[0]
        latent = getattr(attention.config, "multi_latent_attention", False)
        groups = maxima.size(1) if latent else attention.num_query_groups_per_partition
        return row_factors(maxima, groups, attention.config, self._rule)


def _targets(attentions: Sequence[Any], optimizer: MegatronOptimizer) -> dict[int, _Target]:
    """Targets by the id of the stepped tensor."""
    targets = {
        id(param): (param, _Target(name, layer, param.size(1) if param.ndim > 1 else 1))
        for layer, attention in enumerate(attentions)
        for name in clipped_rows(attention.config)
        for param in (getattr(attention, name).weight, getattr(getattr(attention, name), "bias", None))
        if param is not None
    }
    whole = {id(master_of(param)): target for param, target in targets.values()}
    parts = {
        id(part): replace(targets[id(param)][1], start=start)
        for part, param, start in flat_parts(optimizer)
        if id(param) in targets
    }
    return whole | parts


def watches_logits(args: argparse.Namespace) -> bool:
    """Whether a run needs attention logits."""
    return bool(args.qk_clip or args.log_max_attention_logit)
