# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The command line: every Megatron-LM argument, plus one group of ours.

All problems of a command line are collected and raised together as `ArgumentProblems`, on every rank, before any
process group exists.
"""

import argparse
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from megatron_async import platform
from megatron_async.checkpoint import compatibility
from megatron_async.config import validate as rules
from megatron_async.mcore.arguments import check_arguments, make_parser, rank_from_environment
from megatron_async.models import presets
from megatron_async.optim import settings
from megatron_async.optim.algorithms import catalogue
from megatron_async.optim.corrections import CORRECTIONS
from megatron_async.planning import resolve as dry_run
from megatron_async.platform import cpu
from megatron_async.schedules import SCHEDULES


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

    device: str = _option(
        "auto", "Where to compute; auto takes a GPU where there is one.", choices=platform.DEVICE_CHOICES
    )
    model: str | None = _option(
        None,
        "A preset that sets Megatron's architecture arguments; an explicit argument wins. 'list' prints them.",
    )
    pipeline_schedule: str = _option(
        "1f1b",
        "1f1b is Megatron-Core's own, with a bubble in every batch. The others never drain: 2bw has gradients one step "
        "old; 2bw-eager the same, and hides transfers between stages for nearly twice the activations; wpipe one step "
        "old only in the first half of the layers; pipedream, the original, P-1-s steps old on stage s.",
        choices=tuple(SCHEDULES),
    )
    gradient_delay: str | None = _option(
        None,
        "Emulate a delay in one process (pipeline size 1): N updates. The reference for the real schedules.",
    )
    staleness_correction: str = _option(
        "none", "Correction of one-step-old gradients, for any optimizer.", choices=CORRECTIONS
    )
    correction_strength: float = _option(1.0, "Strength of the correction; the paper's lambda.", type=float)
    optimizer_for: tuple[str, ...] | None = _option(
        None,
        "ROLE=NAME: which optimizer steps on the parameters of a role; repeatable. See docs/optimizers.md for roles.",
        action="append",
        metavar="ROLE=NAME",
    )
    undelayed_head: bool = _option(
        False, "With --gradient-delay: the embedding-to-vocabulary head gets fresh gradients (an ablation)."
    )
    delay_first_moment_only: bool = _option(
        False, "With --gradient-delay and Adam: only its first moment gets the old gradient (an ablation)."
    )
    log_update_statistics: int = _option(
        0, "Every so many batches, sizes of the updates by role and of the correction; 0 for never.", type=int
    )
    sync_start_iters: int = _option(0, "Synchronous batches before the delay sets in.", type=int)
    sync_cooldown_iters: int = _option(0, "Synchronous batches at the end of training.", type=int)
    keep_last: int | None = _option(
        None,
        "Delete older checkpoints once so many newer ones are whole; multiples of --save-retain-interval stay.",
        type=int,
    )
    max_consecutive_skips: int = _option(
        10, "Stop when so many updates in a row were skipped because a gradient was not finite.", type=int
    )
    metrics_file: str | None = _option(None, "JSON lines: one per batch and per evaluation.")
    trace_file: str | None = _option(None, "Timeline of this run's pipeline in Chrome's trace format.")
    trace_batches: int = _option(12, "Batches in the timeline, counted from the first one of this run.", type=int)
    emulate_compute_ms: str | None = _option(
        None,
        "F,B: instead of computing, each rank sleeps F ms in the forward and B ms in the backward of a micro-batch. "
        "Schedules and transport run for real; losses mean nothing.",
    )
    dry_run: bool = _option(False, "Resolve, check and print; train nothing. Needs no data and no second process.")


_SAID_BY_RULES = ("world size (", "Megatron requires: args.save_interval ")
"""Megatron's objections about the number of processes and about saves without an interval."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that every problem of a command line can be collected."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron_async.pretrain", allow_abbrev=False, exit_on_error=False)
    group = parser.add_argument_group("megatron_async", "delayed pipeline schedules and what belongs to them")
    for option in fields(AsyncArguments):
        keywords = dict(option.metadata)
        flag = "--" + option.name.replace("_", "-")
        if option.default is False:
            group.add_argument(flag, action="store_true", **keywords)
        else:
            group.add_argument(flag, default=option.default, **keywords)
    make_parser(parser)
    settings.add_arguments(parser)
    parser.set_defaults(
        # The layer-wise distributed optimizer keeps every parameter whole at one owner, whatever steps on it.
        use_layer_wise_param_layout=False,
        dist_ckpt_optim_fully_reshardable=True,  # Megatron's other format is bound to the layout that saved it
        log_interval=1,
        eval_interval=1000,  # Megatron has none, and fails without
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check a command line; derive Megatron's values.

    Raises:
        ArgumentProblems: with everything that is wrong.
        SystemExit: status 0, after `--help` and `--optimizer list`.
    """
    optimizer = _value_of(argv, "--optimizer", "adam")
    if optimizer == "list":
        if os.environ.get("RANK", "0") == "0":
            settings.print_list()
        raise SystemExit(0)
    parser = _make_parser()
    problems: list[str] = []
    if optimizer in catalogue.names():
        parser.set_defaults(weight_decay=settings.default_weight_decay(str(optimizer)))
    device, sentence, problem = _resolve_device(argv)
    if problem is not None:
        problems.append(problem)
    if device == "cpu":
        parser.set_defaults(**{name: value for name, value, _ in (*cpu.ARGUMENTS, *cpu.DEFAULTS)})
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
    args.optimizer_for = args.optimizer_for or []
    given = settings.given(argv, parser)
    problems += settings.problems(args, given)
    problems += compatibility.ignored(given)
    if args.pipeline_schedule == "wpipe" and args.num_virtual_stages_per_pipeline_rank is None:
        args.num_virtual_stages_per_pipeline_rank = 2
    rank_from_environment(args)
    if args.dry_run:
        dry_run.complete(args)
    problems += rules.before_megatron(args)
    if (objection := check_arguments(args)) is not None:
        # Megatron stops at its first objection; some of our rules say the same in more words.
        problems += [] if problems and any(text in objection for text in _SAID_BY_RULES) else [objection]
    else:
        problems += rules.after_megatron(args)
    if args.dry_run and not problems:
        dry_run.pad_vocabulary(args)
    if problems:
        raise ArgumentProblems(list(dict.fromkeys(problems)))
    # Megatron goes on to change some of them while it builds the model; a checkpoint is compared with these.
    args._resolved = compatibility.arguments_as_json(args)
    return args


def asks_for_list(argv: Sequence[str]) -> bool:
    """Whether the command line asks for the presets instead of a run."""
    return _value_of(argv, "--model", None) == "list"


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
            shorter = _without(remaining, flag)
            if shorter is None:
                raise ArgumentProblems(problems) from None
            remaining = shorter
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
