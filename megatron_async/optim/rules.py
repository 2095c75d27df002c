# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Rules for optimizers, corrections of the delay, QK-clip and statistics of updates."""

import argparse
import math
from collections.abc import Iterator

from megatron_async.optim import registry
from megatron_async.optim.options import all_options, options_of
from megatron_async.optim.param_groups import Assignment, parse_overrides
from megatron_async.optim.qk_clip import watches_logits
from megatron_async.schedules import is_delayed

# Megatron's options of every matrix optimizer, by destination.
_MATRIX_OPTIONS = {
    "muon_tp_mode": "--muon-tp-mode",
    "muon_split_qkv": "--muon-no-split-qkv",
    "muon_split_gate_up": "--muon-split-gate-up",
    "muon_scalar_optimizer": "--muon-scalar-optimizer",
}


def problems(args: argparse.Namespace, given: frozenset[str]) -> Iterator[str]:
    """Problems with parsed values.

    Args:
        given: destinations of the options that the command line names.
    """
    overrides, wrong = parse_overrides(args.optimizer_for)
    yield from wrong
    yield from qk_clip_problems(args, given)
    if args.optimizer in registry.names():  # else the parser reports it
        yield from _optimizers(args, given, overrides)
    yield from _correction(args)
    if args.log_update_statistics < 0:
        yield f"--log-update-statistics {args.log_update_statistics}: must be at least 0; 0 is never."


def _optimizers(args: argparse.Namespace, given: frozenset[str], overrides: dict[str, str]) -> Iterator[str]:
    name = args.optimizer
    if name == "sgd" and args.use_distributed_optimizer:
        yield (
            "--optimizer sgd with --use-distributed-optimizer: Megatron's distributed optimizer cannot save "
            "its momentum. Leave --use-distributed-optimizer out, or use another optimizer."
        )
    if name in ("adam", "sgd") and any(other != name for other in overrides.values()):
        yield (
            f"--optimizer {name} steps on every parameter. Name another optimizer with --optimizer and give "
            f"the roles that {name} should have with --optimizer-for ROLE={name}."
        )
        return
    chosen = Assignment(name, args.muon_scalar_optimizer, overrides)
    if not chosen.roles_of(name):
        yield f"--optimizer {name}: --optimizer-for gives all of its roles away; leave it one."
    used = chosen.used()
    yield from _of_others(used, given)
    yield from _out_of_range(args, used)
    if "soap" in used and args.tensor_model_parallel_size > 1:
        yield (
            f"--optimizer soap with --tensor-model-parallel-size {args.tensor_model_parallel_size}: its factors need "
            "the whole matrix, which no rank has. Use tensor-parallel size 1, or another optimizer."
        )
    if args.muon_split_gate_up and not args.swiglu:
        yield "--muon-split-gate-up without --swiglu: there is no gate to split off. Leave it out, or add --swiglu."
    if args.muon_tp_mode == "distributed":
        yield (
            "--muon-tp-mode distributed is not covered; duplicated gives the same update, blockwise one that depends "
            "on the tensor-parallel size."
        )


def _of_others(used: list[str], given: frozenset[str]) -> Iterator[str]:
    """Options of optimizers that this run does not use: they would be ignored."""
    for option in all_options():
        if option.optimizer not in used and option.destination in given:
            valid = ", ".join(own.flag for name in used for own in options_of(name))
            yield (
                f"{option.flag} belongs to --optimizer {option.optimizer}; this run uses {' and '.join(used)}. Their "
                f"options: {valid}."
            )
    if not any(registry.find(name).scope == "matrix" for name in used):
        for destination, flag in _MATRIX_OPTIONS.items():
            if destination in given:
                yield f"{flag} belongs to matrix optimizers; this run uses {' and '.join(used)}. Leave it out."


def _out_of_range(args: argparse.Namespace, used: list[str]) -> Iterator[str]:
    for option in (option for name in used for option in options_of(name)):
        value = getattr(args, option.destination)
        if value not in option.rule:
            yield f"{option.flag} {value}: allowed: {option.rule}."
    rule = registry.find(args.optimizer).hyperparameters.__dataclass_fields__["weight_decay"].metadata["rule"]
    if args.weight_decay not in rule:
        yield f"--weight-decay {args.weight_decay}: allowed: {rule}."


def _correction(args: argparse.Namespace) -> Iterator[str]:
    if not math.isfinite(args.correction_strength) or args.correction_strength < 0:
        yield f"--correction-strength {args.correction_strength}: must be a finite number, at least 0."
    if args.correction_strength != 1.0 and args.staleness_correction == "none":
        yield "--correction-strength without --staleness-correction would be ignored: name a correction."
    if args.correct_matrices_only and args.staleness_correction == "none":
        yield "--correct-matrices-only without --staleness-correction would be ignored: name a correction."
    if args.staleness_correction != "none" and not is_delayed(args):
        yield (
            f"--staleness-correction {args.staleness_correction} corrects one-step-old gradients, but "
            "--pipeline-schedule 1f1b has none. Use --pipeline-schedule 2bw (or --gradient-delay), or leave the "
            "correction out."
        )


def qk_clip_problems(args: argparse.Namespace, given: frozenset[str]) -> Iterator[str]:
    """Problems with the options that need attention logits."""
    if args.qk_clip:
        yield from _clip(args)
    else:
        for name in ("qk_clip_alpha", "qk_clip_threshold"):
            if name in given:
                yield f"--{name.replace('_', '-')} without --qk-clip would be ignored: add --qk-clip."
    if not watches_logits(args):
        return
    flag = "--qk-clip" if args.qk_clip else "--log-max-attention-logit"
    if args.transformer_impl == "local" and args.masked_softmax_fusion and (args.bf16 or args.fp16):
        yield (
            f"not supported with {flag}: --transformer-impl local in 16 bits with the fused softmax, which hides the "
            "logits; add --no-masked-softmax-fusion."
        )
    pattern = args.linear_attention_freq  # a number stands for one softmax attention in so many layers
    if args.experimental_attention_variant is not None and isinstance(pattern, list) and all(pattern):
        yield f"not supported with {flag}: linear attention in every layer: there are no logits; leave it out."


def _clip(args: argparse.Namespace) -> Iterator[str]:
    if not 0 < args.qk_clip_alpha < 1:
        yield f"--qk-clip-alpha {args.qk_clip_alpha}: must be between 0 and 1; the queries' share of a clip."
    if not args.qk_clip_threshold > 0:
        yield f"--qk-clip-threshold {args.qk_clip_threshold}: must be above 0."
    for name in ("qk_layernorm", "qk_l2_norm"):
        # Multi-latent attention normalizes the latents, before the projections that are clipped.
        if getattr(args, name) and not args.multi_latent_attention:
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
