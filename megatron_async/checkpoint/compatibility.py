# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What may differ between the run that saved a checkpoint and the run that resumes from it; checked before loading.

Free: the layout (pipeline, tensor, data and expert parallel sizes, micro-batch size), the pipeline schedule, the
gradient delay, the strength of its correction, intervals, logging, and the length of the run if --lr-decay-iters stays
the same. A correction can begin or (weight prediction excepted) end, but not become another one.
Fixed: whatever the weights, the optimizer's state or the order of samples depend on.
"""

import argparse
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_async.checkpoint import folder

_MODEL = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels group_query_attention "
    "max_position_embeddings position_embedding_type normalization swiglu add_bias_linear add_qkv_bias qk_layernorm "
    "untie_embeddings_and_output_weights vocab_size make_vocab_size_divisible_by num_experts moe_ffn_hidden_size "
    "moe_router_topk moe_shared_expert_intermediate_size"
).split()
_OPTIMIZER = "optimizer fp16 bf16 use_distributed_optimizer use_layer_wise_distributed_optimizer".split()
_DATA = "seed seq_length global_batch_size data_path split mock_data tokenizer_type dataloader_type".split()
# Megatron compares these itself while loading, unless an option says which side wins.
_LEARNING_RATE = (
    "lr min_lr lr_warmup_iters lr_warmup_fraction lr_decay_style lr_decay_iters start_weight_decay end_weight_decay"
).split()
# Derived by Megatron from another option.
_GIVEN_AS = {"use_layer_wise_distributed_optimizer": "use_distributed_optimizer"}
# Optimizers with tensors for whole matrices of a tensor-parallel rank, which cannot be split in another way.
_WHOLE_STATE = ("soap", "normuon")


def ignored(given: Collection[str]) -> Iterator[str]:
    """Options that a command line names (by destination) although nothing would come of them."""
    for name in ("async_strategy", "use_persistent_ckpt_worker", "async_ckpt_use_cpu_shm"):
        if name in given:
            yield (
                f"--{name.replace('_', '-')} would be ignored: it is about a worker process of Megatron's. With "
                "--async-save each rank writes its part of a checkpoint in a thread of its own; leave it out."
            )


def interval(args: argparse.Namespace) -> Iterator[str]:
    """Whether a run that saves says how often."""
    if args.save and (args.save_interval is None or args.save_interval < 1):
        yield (
            f"--save {args.save} with --save-interval {args.save_interval}: give --save-interval N, at least 1, for a "
            "checkpoint after every N batches; the end of a run has one too."
        )


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with the arguments that have to do with checkpoints, among them those with what is to be loaded."""
    for flag in ("save", "load"):
        if getattr(args, flag) and (args.ckpt_format != "torch_dist" or args.ckpt_convert_format):
            yield (
                f"--{flag} with --ckpt-format {args.ckpt_format}: only torch_dist holds the state of a delayed run on "
                "any layout. Leave --ckpt-format and --ckpt-convert-format out."
            )
            return
    if args.async_save and not args.save:
        yield "--async-save without --save would be ignored: name a folder."
    if args.non_persistent_save_interval:
        yield "--non-persistent-save-interval: not supported; use --save-interval with --keep-last."
    if args.keep_last is not None and args.keep_last < 1:
        yield f"--keep-last {args.keep_last}: must be at least 1."
    if args.keep_last is not None and not args.save:
        yield f"--keep-last {args.keep_last} without --save would be ignored: name a folder."
    if args.max_consecutive_skips < 1:
        yield f"--max-consecutive-skips {args.max_consecutive_skips}: must be at least 1."
    if args.load:
        yield from _loading(args, Path(args.load))


def _loading(args: argparse.Namespace, root: Path) -> Iterator[str]:
    try:
        entry, _ = folder.choose(folder.checkpoints(root), root, args.ckpt_step)
    except (ValueError, OSError) as error:
        yield str(error)
        return
    if entry is None and args.exit_on_missing_checkpoint and not folder.is_release(root):
        yield f"--load {root}: no checkpoint there, and --exit-on-missing-checkpoint is given."
    if entry is not None and entry.manifest is not None and not args.finetune:
        yield from differences(args, entry.manifest.arguments, entry.path)


def differences(args: argparse.Namespace, saved: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Arguments that differ from those a checkpoint was saved with although they cannot be changed."""
    fixed = [(name, "the model") for name in _MODEL]
    if not args.no_load_optim:
        fixed += [(name, "the optimizer's state") for name in _OPTIMIZER]
    if args.optimizer in _WHOLE_STATE and not args.no_load_optim:
        fixed.append(("tensor_model_parallel_size", f"the state of {args.optimizer}"))
    fixed += [(name, "which samples a batch holds") for name in _DATA]
    for name, what in fixed:
        if name in saved and hasattr(args, name) and plain(getattr(args, name)) != saved[name]:
            flag = "--" + _GIVEN_AS.get(name, name).replace("_", "-")
            yield (
                f"{flag} is {plain(getattr(args, name))}, but {path} was saved with {saved[name]}; {what} depends on "
                "it. Give the saved value, or start anew without --load (or with --finetune)."
            )
    if not args.no_load_optim:
        yield from _correction(args, saved, path)
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler or args.no_load_optim:
        return
    now, before = _learning_rate(vars(args)), _learning_rate(saved)
    for name in _LEARNING_RATE:
        if name in before and now[name] != before[name]:
            yield (
                f"--{name.replace('_', '-')} is {now[name]}, but {path} was saved with {before[name]}. Give the saved "
                "value, or say which counts: --override-opt-param-scheduler (this one) or "
                "--use-checkpoint-opt-param-scheduler."
            )


def _correction(args: argparse.Namespace, saved: Mapping[str, Any], path: Path) -> Iterator[str]:
    """A correction keeps one buffer, in which others would read something else; its strength may change.

    Weight prediction, besides, trains with other weights than those that count: only it knows the way back.
    """
    before, now = saved.get("staleness_correction", "none"), args.staleness_correction
    if before == now or before == "none" or (now == "none" and not before.startswith("weight-prediction")):
        return
    yield (
        f"--staleness-correction is {now}, but {path} was saved with {before}, whose memory means something else. Give "
        "the saved value, or start anew without --load (or with --no-load-optim)."
    )


def _learning_rate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that shape the learning rate; it decays over the whole run where nothing else is said."""
    values = {name: plain(arguments[name]) for name in _LEARNING_RATE if name in arguments}
    if values.get("lr_decay_iters", 0) is None:
        values["lr_decay_iters"] = arguments["train_iters"]
    return values


def plain(value: Any) -> Any:
    """An argument's value as JSON has it; what JSON does not have is written as text."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def arguments_as_json(args: argparse.Namespace) -> dict[str, Any]:
    """All public arguments as JSON values, by name; those that differ by rank are left out."""
    return {
        name: plain(value)
        for name, value in sorted(vars(args).items())
        if not name.startswith("_") and name not in ("rank", "local_rank")
    }
