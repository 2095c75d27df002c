# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""QK-clip, MuonClip's bound on attention logits (Kimi K2, arXiv 2507.20534, section 2.1), for grouped queries too.

S is the largest logit of a head over a batch, tau the threshold. After the update of the batch, with

    eta = min(1, tau / S)                                  for each head

the weights of the queries of a head with keys of its own are scaled by eta^alpha, those of its keys by eta^(1-alpha),
so that its logits shrink by eta. Where the heads of a group share their keys,

    keys      eta_g^(1-alpha)                              eta_g: the smallest eta of the group
    queries   min(1, eta / eta_g^(1-alpha))                for each head

The head with the largest logit of a group is treated as above. The others shrink with the keys, which cannot be helped,
and beyond that only as far as their own logits ask for; nothing is ever scaled up. (Megatron's own clip, which is
experimental for grouped queries, scales all queries of a group by eta_g^alpha.) Biases of queries and keys are scaled
with their weights. Values and output gates stay.

The clip is the end of the update: it follows weight decay and the correction of the delay, and acts on the master
weights. What optimizers and corrections remember (momentum, the previous update) is not scaled.
"""

import argparse
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_async.mcore.model import softmax_attentions
from megatron_async.mcore.optimizer import flat_parts, master_of
from megatron_async.optim.roles import qkv_rows
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


def row_factors(maxima: Tensor, groups: int, rows: Sequence[int], rule: ClipRule) -> Tensor:
    """One factor for each row of fused projections.

    Args:
        maxima: [layers, heads], the heads of a group one after the other.
        groups: key and value groups.
        rows: rows of a group's queries, output gates (where there are four blocks), keys and values.
        rule: the threshold and how a clip is shared.

    Returns:
        [layers, groups * sum(rows)].
    """
    queries, keys = head_factors(maxima.unflatten(1, (groups, -1)), rule)
    of_heads = queries.repeat_interleave(rows[0] // queries.size(-1), dim=-1)
    gates = [maxima.new_ones(*keys.shape, size) for size in rows[1:-2]]
    values = maxima.new_ones(*keys.shape, rows[-1])
    return torch.cat([of_heads, *gates, keys.unsqueeze(-1).expand(-1, -1, rows[-2]), values], dim=-1).flatten(1)


@dataclass(frozen=True, slots=True)
class _Target:
    """What an optimizer steps on for a projection: all of it, or flat elements of it from `start` on.

    Attributes:
        layer: position among the softmax attentions.
        columns: of the weight; 1 for a bias.
        start: first element in the flattened projection; None where the tensor has the projection's own shape.
    """

    layer: int
    columns: int
    start: int | None = None

    def factors(self, rows: Tensor, tensor: Tensor) -> Tensor:
        """Factors of all layers' rows -> those of the tensor's elements, in a shape that broadcasts to it."""
        own = rows[self.layer]
        if self.start is None:
            return own.view(-1, *[1] * (tensor.ndim - 1))
        first, last = self.start // self.columns, (self.start + tensor.numel() - 1) // self.columns
        whole = own[first : last + 1].repeat_interleave(self.columns)
        offset = self.start - first * self.columns
        return whole[offset : offset + tensor.numel()].view_as(tensor)


class QkClip:
    """The last part of an optimizer step: clips query and key projections by the logits of the batch.

    Args:
        chunks: the optimizer's model chunks.
        optimizer: Megatron's.
        rule: the threshold and how a clip is shared.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: MegatronOptimizer, rule: ClipRule) -> None:
        attentions = softmax_attentions(chunks)
        self._rule = rule
        self._targets = _targets(attentions, optimizer)
        self._context: StepContext | None = None
        self._factors: Tensor | None = None
        if attentions:
            self._groups = attentions[0].num_query_groups_per_partition
            self._rows = qkv_rows(attentions[0].config)

    def __call__(self, piece: Piece, context: StepContext) -> None:
        """Part of a step, after the correction. Parameters without a gradient were skipped and stay."""
        if context is not self._context:
            self._context, self._factors = context, self._row_factors(context.logits)
        if self._factors is None:
            return
        for param in piece.params:
            target = self._targets.get(id(param))
            if target is not None and _has_gradient(param):
                param.detach().mul_(target.factors(self._factors, param))

    def _row_factors(self, maxima: Tensor | None) -> Tensor | None:
        if maxima is None or not maxima.numel():
            return None
        return row_factors(maxima, self._groups, self._rows, self._rule)


def _targets(attentions: Sequence[Any], optimizer: MegatronOptimizer) -> dict[int, _Target]:
    """Projections by the id of what may be stepped on for them."""
    projections = {}
    for layer, attention in enumerate(attentions):
        weight, bias = attention.linear_qkv.weight, getattr(attention.linear_qkv, "bias", None)
        projections[id(weight)] = weight, _Target(layer, weight.size(1))
        if bias is not None:
            projections[id(bias)] = bias, _Target(layer, 1)
    whole = {id(master_of(param)): target for param, target in projections.values()}
    parts = {
        id(part): _Target(projections[id(param)][1].layer, projections[id(param)][1].columns, start)
        for part, param, start in flat_parts(optimizer)
        if id(param) in projections
    }
    return whole | parts


def _has_gradient(param: Tensor) -> bool:
    """Whether a step changes it: one without a gradient has been skipped."""
    return param.grad is not None or getattr(param, "decoupled_grad", None) is not None


def watches_logits(args: argparse.Namespace) -> bool:
    """Whether a run needs attention logits."""
    return bool(args.qk_clip or args.log_max_attention_logit)


def problems(args: argparse.Namespace, given_destinations: Collection[str]) -> Iterator[str]:
    """Everything that is wrong with the options that need attention logits."""
    if not args.qk_clip:
        for name in ("qk_clip_alpha", "qk_clip_threshold"):
            if name in given_destinations:
                yield f"--{name.replace('_', '-')} without --qk-clip would be ignored: add --qk-clip."
    if args.qk_clip:
        yield from _clip_problems(args)
    if not watches_logits(args):
        return
    flag = "--qk-clip" if args.qk_clip else "--log-max-attention-logit"
    unsupported = {
        "--multi-latent-attention: its logits come from compressed and shared parts, which are not covered": (
            args.multi_latent_attention
        ),
        "--transformer-impl local in 16 bits with the fused softmax, which hides the logits; add "
        "--no-masked-softmax-fusion": (
            args.transformer_impl == "local" and args.masked_softmax_fusion and (args.bf16 or args.fp16)
        ),
        "CUDA graphs: a replayed graph reports no logits; leave them out": args.cuda_graph_impl != "none",
        "layers of different kinds (--heterogeneous-layers-config-path): untested": (
            args.heterogeneous_layers_config_path is not None
            or args.heterogeneous_layers_config_encoded_json is not None
        ),
        "FSDP: untested; use data parallelism": args.use_megatron_fsdp or args.use_torch_fsdp2,
        "--optimizer-cpu-offload: untested; leave it out": args.optimizer_cpu_offload,
        "FP8 and FP4: untested; use --bf16": args.fp8 is not None or args.fp4 is not None,
        "linear attention in every layer: there are no logits; leave it out": _has_no_softmax(args),
    }
    for reason, broken in unsupported.items():
        if broken:
            yield f"not supported with {flag}: {reason}."


def _clip_problems(args: argparse.Namespace) -> Iterator[str]:
    if not 0 < args.qk_clip_alpha < 1:
        yield f"--qk-clip-alpha {args.qk_clip_alpha}: must be between 0 and 1; the queries' share of a clip."
    if not args.qk_clip_threshold > 0:
        yield f"--qk-clip-threshold {args.qk_clip_threshold}: must be above 0."
    for name in ("qk_layernorm", "qk_l2_norm"):
        if getattr(args, name):
            yield (
                f"--qk-clip with --{name.replace('_', '-')}: queries and keys are normalized, so that scaling their "
                "weights does not change the logits, which the norm bounds already. Leave one of them out."
            )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups is not None and args.tensor_model_parallel_size > groups:
        yield (
            f"--qk-clip with --tensor-model-parallel-size {args.tensor_model_parallel_size} and {groups} key/value "
            "groups: ranks would clip parts of one head's keys by different factors. Use a tensor-parallel size that "
            "divides the number of groups."
        )


def _has_no_softmax(args: argparse.Namespace) -> bool:
    pattern = args.linear_attention_freq  # a number stands for one softmax attention in so many layers
    return args.experimental_attention_variant is not None and isinstance(pattern, list) and all(pattern)
