# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The command line: every Megatron-LM argument, plus one group of ours.

All problems of a command line are collected and raised together as `ArgumentProblems`, on every rank, before any
process group exists.
"""

import argparse
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from megatron_async import megatron, platform
from megatron_async.models import presets
from megatron_async.platform import cpu

PIPELINE_SCHEDULES = ("1f1b", "2bw")
STALENESS_CORRECTIONS = ("none", "error-feedback")


class ArgumentProblems(ValueError):
    """Everything that is wrong with a command line, one readable line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def _option(default: Any, help: str, **kwargs: Any) -> Any:
    """A dataclass field that becomes one command-line option."""
    return field(default=default, metadata={"help": help, **kwargs})


@dataclass(frozen=True, kw_only=True)
class AsyncArguments:
    """Arguments that megatron_async adds to Megatron-LM's; the names are fixed for users' scripts."""

    device: str = _option("auto", "Where to compute; auto takes a GPU where there is one.", choices=platform.DEVICE_CHOICES)
    model: str | None = _option(
        None, "A preset that sets Megatron's architecture arguments; an explicit argument wins. 'list' prints them."
    )
    pipeline_schedule: str = _option(
        "1f1b",
        "1f1b is Megatron-Core's own, with a bubble in every batch; 2bw never drains, with gradients one step old.",
        choices=PIPELINE_SCHEDULES,
    )
    gradient_delay: str | None = _option(
        None, "Emulate a delay in one process (pipeline size 1): N updates. The reference for the real schedules."
    )
    staleness_correction: str = _option(
        "none", "Correction of one-step-old gradients, for any optimizer.", choices=STALENESS_CORRECTIONS
    )
    correction_strength: float = _option(1.0, "Strength of the correction; the paper's lambda.", type=float)
    sync_start_iters: int = _option(0, "Synchronous batches before the delay sets in.", type=int)
    sync_cooldown_iters: int = _option(0, "Synchronous batches at the end of training.", type=int)
    metrics_file: str | None = _option(None, "JSON lines: one per batch and per evaluation.")
    trace_file: str | None = _option(None, "Timeline of this run's pipeline in Chrome's trace format.")
    trace_batches: int = _option(12, "Batches in the timeline, counted from the first one of this run.", type=int)
    dry_run: bool = _option(False, "Resolve, check and print; train nothing. Needs no data and no second process.")


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every problem of a command line can be collected."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron_async.pretrain", allow_abbrev=False, exit_on_error=False)
    group = parser.add_argument_group("megatron_async", "delayed pipeline schedules and what belongs to them")
    for option in fields(AsyncArguments):
        keywords = {key: value for key, value in option.metadata.items()}
        flag = "--" + option.name.replace("_", "-")
        if option.default is False:
            group.add_argument(flag, action="store_true", **keywords)
        else:
            group.add_argument(flag, default=option.default, **keywords)
    megatron.make_parser(parser)
    # The paper's optimizer settings where Megatron's command line has other defaults (see docs/optimizers.md).
    parser.set_defaults(
        muon_momentum=0.95,  # Moonlight, arXiv 2502.16982, and section 2.1 of arXiv 2606.30634
        muon_extra_scale_factor=0.2,  # update RMS 0.2: 0.2 * sqrt(max(rows, columns)), Moonlight
        muon_tp_mode="duplicated",  # orthogonalize the whole matrix, not a tensor-parallel block of it
        adam_beta2=0.95,  # section 2.1 of arXiv 2606.30634
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check a command line; derive Megatron's values.

    Raises:
        ArgumentProblems: with everything that is wrong.
        SystemExit: status 0, after `--help`.
    """
    parser = _make_parser()
    problems: list[str] = []
    device, sentence, problem = _resolve_device(argv)
    if problem is not None:
        problems.append(problem)
    chosen = {name: value for name, value, _ in cpu.ARGUMENTS} if device == "cpu" else {}
    parser.set_defaults(**chosen)
    preset, problem = _resolve_preset(argv)
    if problem is not None:
        problems.append(problem)
    parser.set_defaults(**preset)

    args = _collect(parser, argv, problems)
    for name, value, reason in cpu.ARGUMENTS if device == "cpu" else ():
        if getattr(args, name) != value:
            problems.append(
                f"--{name.replace('_', '-')} {getattr(args, name)}: on --device cpu this must be {value} ({reason}). "
                "Leave the argument out, or run on GPUs."
            )
            setattr(args, name, value)
    args.device, args.device_sentence = device, sentence
    megatron.rank_from_environment(args)
    problems += _ours(args)
    if (objection := megatron.check_arguments(args)) is not None:
        problems.append(objection)
    elif not problems:
        problems += _after_megatron(args)
    if problems:
        raise ArgumentProblems(list(dict.fromkeys(problems)))
    return args


def _value_of(argv: Sequence[str], flag: str, default: str | None) -> str | None:
    """The last value given for one of our flags, before the full parse."""
    value = default
    for index, token in enumerate(argv):
        if token == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif token.startswith(flag + "="):
            value = token.partition("=")[2]
    return value


def _resolve_device(argv: Sequence[str]) -> tuple[platform.Device, str, str | None]:
    requested = _value_of(argv, "--device", "auto")
    if requested not in platform.DEVICE_CHOICES:
        requested = "auto"  # the parser reports the invalid choice
    try:
        device, sentence = platform.choose(str(requested))
    except ValueError as error:
        return "cpu", "", str(error)
    return device, sentence, None


def _resolve_preset(argv: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    name = _value_of(argv, "--model", None)
    if name is None:
        return {}, None
    try:
        return presets.arguments(name), None
    except ValueError as error:
        return {}, str(error)


def _collect(parser: argparse.ArgumentParser, argv: Sequence[str], problems: list[str]) -> argparse.Namespace:
    """Parse; report each bad option, leave it out and parse again until the rest is readable."""
    remaining = list(argv)
    while True:
        try:
            args, unknown = parser.parse_known_args(remaining)
        except argparse.ArgumentError as error:
            problems.append(str(error).removeprefix("argument "))
            flag = (error.argument_name or "").split("/")[-1]
            remaining = _without(remaining, flag)
            if remaining is None:
                raise ArgumentProblems(problems) from None
            continue
        known = [flag for action in parser._actions for flag in action.option_strings]
        for token in unknown:
            if token.startswith("--"):
                near = difflib.get_close_matches(token.partition("=")[0], known, n=1)
                problems.append(f"{token}: no such argument" + (f"; did you mean {near[0]}?" if near else "."))
        if unknown and not any(token.startswith("--") for token in unknown):
            problems.append(f"values that belong to no argument: {' '.join(unknown)}")
        return args


def _without(argv: list[str], flag: str) -> list[str] | None:
    """`argv` with `flag` and its values removed; None when it is not there (nothing left to leave out)."""
    for index, token in enumerate(argv):
        if token == flag or token.startswith(flag + "="):
            end = index + 1
            while end < len(argv) and not argv[end].startswith("--"):
                end += 1
            return argv[:index] + argv[end:]
    return None


def _ours(args: argparse.Namespace) -> list[str]:
    """Rules that need only the parsed values."""
    problems = []
    stages = args.pipeline_model_parallel_size
    if not math.isfinite(args.correction_strength) or args.correction_strength < 0:
        problems.append(f"--correction-strength {args.correction_strength}: must be a finite number, at least 0.")
    if args.correction_strength != 1.0 and args.staleness_correction == "none":
        problems.append("--correction-strength without --staleness-correction would be ignored: name a correction.")
    for name in ("sync_start_iters", "sync_cooldown_iters"):
        if getattr(args, name) < 0:
            problems.append(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 0.")
    delayed = is_delayed(args)
    if args.sync_start_iters + args.sync_cooldown_iters > 0 and not delayed:
        problems.append(
            "--sync-start-iters and --sync-cooldown-iters switch a delay off and on, but --pipeline-schedule 1f1b has "
            "none. Use --pipeline-schedule 2bw (or --gradient-delay), or leave them out."
        )
    if args.staleness_correction != "none" and not delayed:
        problems.append(
            f"--staleness-correction {args.staleness_correction} corrects one-step-old gradients, but --pipeline-schedule "
            "1f1b has none. Use --pipeline-schedule 2bw (or --gradient-delay), or leave the correction out."
        )
    if args.gradient_delay is not None:
        if not args.gradient_delay.isdecimal() or int(args.gradient_delay) > 64:
            problems.append(f"--gradient-delay {args.gradient_delay}: must be a whole number from 0 to 64.")
        if stages != 1 or args.pipeline_schedule != "1f1b":
            problems.append(
                f"--gradient-delay emulates a delay without a pipeline, but --pipeline-model-parallel-size is {stages} and "
                f"--pipeline-schedule is {args.pipeline_schedule}. Use one pipeline stage and leave --pipeline-schedule out."
            )
    if args.pipeline_schedule == "2bw" and stages < 2:
        problems.append(
            f"--pipeline-schedule 2bw needs at least 2 pipeline stages, --pipeline-model-parallel-size is {stages}. "
            "Raise it, or use --gradient-delay 1 to emulate the delay in one process."
        )
    if args.trace_batches < 1:
        problems.append(f"--trace-batches {args.trace_batches}: must be at least 1.")
    if args.num_layers is not None and args.num_layers % stages != 0 and not _uneven_layout(args):
        problems.append(
            f"--num-layers {args.num_layers} cannot be split evenly over --pipeline-model-parallel-size {stages}. Change one of "
            "them, or give an uneven split (--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or "
            "--pipeline-model-parallel-layout)."
        )
    if delayed:
        problems += _unsupported_with_delay(args)
    return problems


def _uneven_layout(args: argparse.Namespace) -> bool:
    return any(
        (
            args.decoder_first_pipeline_num_layers,
            args.decoder_last_pipeline_num_layers,
            args.pipeline_model_parallel_layout,
            args.account_for_embedding_in_pipeline_split,
            args.account_for_loss_in_pipeline_split,
        )
    )


def is_delayed(args: argparse.Namespace) -> bool:
    """Whether gradients are taken at older weights than the update is applied to."""
    return args.pipeline_schedule != "1f1b" or args.gradient_delay is not None


def _unsupported_with_delay(args: argparse.Namespace) -> list[str]:
    """Megatron features that the delayed schedules do not cover; running them would be silently wrong."""
    rules = (
        (args.fp16, "--fp16", "its dynamic loss scale decides about a step after later forwards have run; use --bf16"),
        (args.use_megatron_fsdp or args.use_torch_fsdp2, "FSDP", "weights are gathered for each use, so two versions cannot be kept; use data parallelism"),
        (args.num_layers_per_virtual_pipeline_stage is not None or args.num_virtual_stages_per_pipeline_rank is not None, "interleaved virtual stages", "2bw has no bubble to shrink; leave them out"),
        (args.mtp_num_layers is not None, "--mtp-num-layers", "its gradients are clipped by a norm of their own; untested"),
        (args.context_parallel_size > 1, f"--context-parallel-size {args.context_parallel_size}", "untested; use 1"),
        (args.tensor_model_parallel_size > 1, f"--tensor-model-parallel-size {args.tensor_model_parallel_size}", "not covered yet; use 1"),
        (args.num_experts is not None, f"--num-experts {args.num_experts}", "not covered yet; use a dense model"),
        (args.use_distributed_optimizer, "--use-distributed-optimizer", "not covered yet; leave it out"),
        (args.calculate_per_token_loss, "--calculate-per-token-loss", "not covered yet; leave it out"),
        (args.fp8 is not None or args.fp4 is not None, "FP8 and FP4", "untested; use --bf16"),
        (args.rampup_batch_size is not None or args.step_batch_size_schedule is not None, "a changing batch size", "the number of micro-batches must stay the same; use a constant --global-batch-size"),
        (args.train_samples is not None, "--train-samples", "give --train-iters instead"),
        (args.optimizer_cpu_offload, "--optimizer-cpu-offload", "untested; leave it out"),
        (args.overlap_param_gather, "--overlap-param-gather", "the new weights are published by the schedule itself; leave it out"),
        (args.cuda_graph_impl != "none", "CUDA graphs", "a graph holds fixed weight addresses, a delayed schedule switches them"),
        (args.load is not None, "--load", "checkpoints of delayed runs cannot be resumed exactly yet; leave it out"),
    )  # fmt: skip
    return [
        f"{name} with {_delay_name(args)}: not supported, because {reason}."
        if not reason.startswith(("untested", "not covered", "give"))
        else f"{name} with {_delay_name(args)}: {reason}."
        for broken, name, reason in rules
        if broken
    ]


def _delay_name(args: argparse.Namespace) -> str:
    return "--gradient-delay" if args.gradient_delay is not None else f"--pipeline-schedule {args.pipeline_schedule}"


def _after_megatron(args: argparse.Namespace) -> list[str]:
    """Rules that need Megatron's derived values: data-parallel size, batch sizes, iterations, the model's configuration."""
    from megatron_async.data.blend import missing_data_files

    problems = []
    per_step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % per_step != 0:
        problems.append(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size {args.micro_batch_size} x "
            f"data-parallel size {args.data_parallel_size} = {per_step}."
        )
    microbatches = args.global_batch_size // per_step
    stages = args.pipeline_model_parallel_size
    if args.pipeline_schedule != "1f1b" and microbatches < stages:
        problems.append(
            f"--pipeline-schedule {args.pipeline_schedule} needs at least as many micro-batches per batch as pipeline stages: "
            f"{microbatches} micro-batches (global batch {args.global_batch_size} / micro-batch {args.micro_batch_size} / "
            f"data-parallel {args.data_parallel_size}) for {stages} stages. Raise --global-batch-size to at least "
            f"{stages * per_step}, lower --micro-batch-size or the data-parallel size, or use fewer stages."
        )
    if args.train_iters is not None and args.sync_start_iters + args.sync_cooldown_iters > args.train_iters:
        problems.append(
            f"--sync-start-iters {args.sync_start_iters} + --sync-cooldown-iters {args.sync_cooldown_iters} is more than "
            f"--train-iters {args.train_iters}."
        )
    problems += missing_data_files(args)
    try:
        megatron.gpt_config_from_args(_with_vocabulary(args)).finalize()
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        problems.append(str(error))
    return problems


def _with_vocabulary(args: argparse.Namespace) -> argparse.Namespace:
    """A copy with some vocabulary size: the tokenizer, which knows the true one, is not built yet."""
    copy = argparse.Namespace(**vars(args))
    if copy.vocab_size is None and getattr(copy, "padded_vocab_size", None) is None:
        copy.vocab_size = copy.make_vocab_size_divisible_by
    return copy
