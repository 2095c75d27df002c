# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Rules for saving, and for the run that resumes from a checkpoint; checked before anything is loaded.

Free to change: the layout (pipeline, tensor, data and expert parallel sizes, micro-batch size), the pipeline schedule,
the gradient delay, the strength of its correction, hyper-parameters of the optimizer, intervals, logging, and the
length of the run if --lr-decay-iters stays the same. A correction may begin or, except weight prediction, end; it may
not become another one. The learning rate may change if the command line says which side wins.
Fixed: all that the weights, the optimizer's state or the order of samples depend on (`on_resume`).
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_async.checkpoint import folder, on_resume
from megatron_async.checkpoint.manifest import json_value
from megatron_async.checkpoint.on_resume import option
from megatron_async.files import obstacle
from megatron_async.mcore import checkpoint as distributed
from megatron_async.models import hybrid

# Optimizers with tensors for whole matrices of a tensor-parallel rank, which cannot be split in another way.
_WHOLE_STATE = ("soap", "normuon")


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with parsed values."""
    if args.save and (args.save_interval is None or args.save_interval < 1):
        yield (
            f"--save {args.save} with --save-interval {args.save_interval}: give --save-interval N, at least 1, for a "
            "checkpoint after every N batches; the end of a run has one too."
        )
    # `Store.prepare` finds what rights do not show, but after the model is built.
    if args.save and not args.dry_run and (reason := obstacle(Path(args.save, folder.TRACKER))):
        yield f"--save {args.save}: {reason}. Name a folder that every rank can write to."


def derived_problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with derived values, and with the checkpoint that --load names."""
    for flag in ("save", "load"):
        if getattr(args, flag) and (args.ckpt_format != "torch_dist" or args.ckpt_convert_format):
            yield (
                f"--{flag} with --ckpt-format {args.ckpt_format}: only torch_dist holds the state of a delayed run on "
                "any layout. Leave --ckpt-format and --ckpt-convert-format out."
            )
            return
    keep, skips = args.keep_last, args.max_consecutive_skips
    if args.async_save and not args.save:
        yield "--async-save without --save would be ignored: name a folder."
    if keep is not None and keep < 1:
        yield f"--keep-last {keep}: must be at least 1."
    if keep is not None and not args.save:
        yield f"--keep-last {keep} without --save would be ignored: name a folder."
    if skips < 1:
        yield f"--max-consecutive-skips {skips}: must be at least 1."
    entry = None
    if args.load:
        root = Path(args.load)
        try:
            entry = folder.choose(root, args.ckpt_step)
        except (ValueError, OSError) as error:
            yield str(error)
            return
        yield from _loading(args, root, entry)
    if args.save and not args.skip_train:
        yield from _replaced(args, entry.iteration if entry is not None and not args.finetune else 0)


def _loading(args: argparse.Namespace, root: Path, entry: folder.Found | None) -> Iterator[str]:
    """Problems with the checkpoint that a run would start from, or with there being none."""
    if entry is None:
        if folder.pointer(root) != folder.RELEASE:
            yield from _nothing_to_load(args, root)
        return
    if args.finetune:
        return
    saved = arguments_of(entry)
    without = next((name for name in ("no_save_optim", "freeze_all_layers") if saved.get(name)), None)
    if without and not args.no_load_optim and not args.freeze_all_layers:
        yield (
            f"--load {root}: {entry.path} holds no optimizer state (it was saved with {option(without)}). Give "
            "--no-load-optim to go on with a new one at the checkpoint's iteration, or --finetune to begin at 0."
        )
    yield from differences(args, saved, entry.path)


def _nothing_to_load(args: argparse.Namespace, root: Path) -> Iterator[str]:
    """A mistyped folder must not train from random weights. A run that continues itself finds nothing at first."""
    begins = args.save is not None and root.resolve() == Path(args.save).resolve() and not args.finetune
    if args.pretrained_checkpoint is not None:
        pretrained = Path(args.pretrained_checkpoint)
        if not folder.checkpoints(pretrained) and folder.pointer(pretrained) != folder.RELEASE:
            yield f"--pretrained-checkpoint {pretrained}: no checkpoint there. Correct the folder."
    elif args.exit_on_missing_checkpoint:
        yield f"--load {root}: no checkpoint there, and --exit-on-missing-checkpoint is given."
    elif not begins:
        yield (
            f"--load {root}: no checkpoint there. Correct the folder, or leave --load out to begin with random "
            "weights. (Only a run that saves to the same folder and continues itself may begin without one.)"
        )


def _replaced(args: argparse.Namespace, start: int) -> Iterator[str]:
    """A run that begins at iteration `start` must not replace later checkpoints: those of the same command's first
    start, or of a run that went on beyond --ckpt-step."""
    root = Path(args.save)
    there = folder.newest(root)
    if there is None or there.iteration <= start:
        return
    way = f"--load {root}"
    if args.ckpt_step is not None:
        way += " without --ckpt-step"
    if args.finetune:
        way += (
            f" without --finetune (one command for every start: --pretrained-checkpoint {args.load} --load {root} "
            f"--save {root})"
        )
    yield (
        f"--save {root} holds a checkpoint of iteration {there.iteration}, and this run would begin at {start} and "
        f"replace it. To continue that run give {way}. To begin again name another folder."
    )


def arguments_of(entry: folder.Found) -> Mapping[str, Any]:
    """Arguments of the run that saved a checkpoint, as JSON values; without a manifest, Megatron's."""
    if entry.manifest is not None:
        return entry.manifest.arguments
    saved = {name: json_value(value) for name, value in vars(distributed.arguments_of(entry.path)).items()}
    if not saved.get("group_query_attention"):
        saved.pop("num_query_groups", None)  # Megatron sets it while it counts operations
    return saved


def take_schedule(args: argparse.Namespace) -> None:
    """With --use-checkpoint-opt_param-scheduler: take the checkpoint's learning rate and weight decay."""
    if not args.use_checkpoint_opt_param_scheduler or not args.load or args.finetune or args.no_load_optim:
        return
    if (entry := folder.choose(Path(args.load), args.ckpt_step)) is not None:
        saved = arguments_of(entry)
        vars(args).update({name: value for name, value in _schedule(saved).items() if hasattr(args, name)})


def differences(args: argparse.Namespace, saved: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Arguments that may not differ from those of the saved run, but do."""
    with_optimizer = () if args.no_load_optim else (on_resume.OPTIMIZER,)
    classes = (on_resume.MODEL, on_resume.DATA, *with_optimizer)
    fixed = {name: fixed.what for fixed in classes for name in fixed.names}
    if with_optimizer and args.optimizer in _WHOLE_STATE:
        fixed["tensor_model_parallel_size"] = f"the state of {args.optimizer}"
    if args.hybrid_layer_pattern is not None:
        fixed = {name: what for name, what in fixed.items() if name not in on_resume.LAYER_KINDS}
    if hybrid.continues_gpt(args.hybrid_layer_pattern, saved):
        del fixed["num_layers"]  # two layers for each of the GPT's
    elif hybrid.layers_of(args.hybrid_layer_pattern or "") != hybrid.layers_of(saved.get("hybrid_layer_pattern") or ""):
        fixed["hybrid_layer_pattern"] = "the model"  # its stages may change
    contents = {getattr(args, "data_contents", None), saved.get("data_contents")}
    if None not in contents:
        fixed = {name: what for name, what in fixed.items() if name not in on_resume.PATHS}
        if len(contents) > 1:
            yield (
                f"the training data are not those that {path} was saved with (other documents, other weights or "
                "another order of the sets); the samples of a batch would change. Give the same data, or start anew "
                "without --load (or with --finetune)."
            )
    for name, what in fixed.items():
        if name in saved and hasattr(args, name) and (now := json_value(getattr(args, name))) != saved[name]:
            ways = "--finetune or --no-load-optim" if name in on_resume.OPTIMIZER.names else "--finetune"
            yield (
                f"{option(name)} is {now}, but {path} was saved with {saved[name]}; {what} would change. Give the "
                f"saved value, or start anew without --load (or with {ways})."
            )
    if args.no_load_optim:
        return
    yield from _correction(args, saved, path)
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    new, old = _schedule(vars(args)), _schedule(saved)
    for name in old:
        if name in new and new[name] != old[name]:
            yield (
                f"{option(name)} is {new[name]}, but {path} was saved with {old[name]}. Give the saved "
                "value, or choose a side: --override-opt-param-scheduler (this one) or "
                "--use-checkpoint-opt-param-scheduler."
            )


def _correction(args: argparse.Namespace, saved: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Corrections share one buffer and use it differently. Weight prediction also changes the weights of training."""
    before, now = saved.get("staleness_correction", "none"), args.staleness_correction
    if before == now or before == "none" or (now == "none" and not before.startswith("weight-prediction")):
        return
    yield (
        f"--staleness-correction is {now}, but {path} was saved with {before}, whose buffer has another meaning. Give "
        "the saved value, or start anew without --load (or with --no-load-optim)."
    )


def _schedule(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that shape learning rate and weight decay; by default both change over the whole run."""
    values = {name: json_value(arguments[name]) for name in on_resume.SCHEDULE.names if name in arguments}
    for unit in ("iters", "samples"):
        if values.get(f"lr_decay_{unit}", 0) is None:
            values[f"lr_decay_{unit}"] = arguments.get(f"train_{unit}")
    if values.get("lr_decay_style") != "WSD":
        values = {name: value for name, value in values.items() if name not in on_resume.WSD}
    if values.get("weight_decay_incr_style", "constant") != "constant":
        values |= {name: arguments.get(name) for name in ("train_iters", "train_samples")}
    return values
