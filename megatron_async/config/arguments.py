# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""From a command line to checked arguments. All problems are raised at once, before any process group exists."""

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence

from megatron_async import platform
from megatron_async.checkpoint import rules as checkpoint_rules
from megatron_async.checkpoint.manifest import arguments_as_json
from megatron_async.config import validate
from megatron_async.config.command_line import value_of, without
from megatron_async.config.contract import check
from megatron_async.config.parser import actions_given, make_parser
from megatron_async.launcher import is_first_rank
from megatron_async.mcore.arguments import check_arguments, rank_from_environment
from megatron_async.mcore.batch_sizes import BatchSizes, ramp
from megatron_async.models import hybrid, presets
from megatron_async.optim import listing, registry
from megatron_async.planning import balance, devices
from megatron_async.planning import resolve as dry_run
from megatron_async.platform import cpu, gpu
from megatron_async.schedules import is_delayed, schedule_of

_SAID_BY_RULES = (
    "world size (",
    "eval_global_batch_size (",
    "A single data source must be provided",
    "Megatron requires: --save-interval ",
    "Megatron requires: not --swiglu",
)
"""Objections of Megatron's that our rules state in more words: number of processes, batches of whole micro-batches, one
source of data, saves without an interval, two activation functions."""


class ArgumentProblems(ValueError):
    """Everything that is wrong with a command line, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check a command line; derive Megatron's values.

    Raises:
        ArgumentProblems: with everything that is wrong.
        SystemExit: status 0, after `--help` and `--optimizer list`.
    """
    if value_of(argv, "--optimizer") == "list":
        if is_first_rank():
            listing.print_list()
        raise SystemExit(0)
    parser = make_parser(texts=not {"--help", "-h"}.isdisjoint(argv))
    problems: list[str] = []
    device, device_sentence = _set_defaults(parser, argv, problems)
    args = _collect(parser, argv, problems)
    if device == "cuda":
        gpu.adjust(args)
    args.device, args.device_sentence = device, device_sentence
    given = actions_given(parser, argv)
    older = list(hybrid.take_older_options(args))
    problems += check.problems(args, given, parser)
    args._notices = [*older, *check.notices(args, given)]
    if is_delayed(args):  # the contract calls them inert
        args.num_layers_per_virtual_pipeline_stage = args.num_virtual_stages_per_pipeline_rank = None
    args.optimizer_for = args.optimizer_for or []
    problems += [*_plan_device(args, argv), *balance.begin(args)]
    chunks, layout = schedule_of(args).chunks, args.pipeline_model_parallel_layout
    args.model_class = args.model_class or hybrid.default_class(args)
    if args.hybrid_layer_pattern is not None:
        hybrid.complete(args, chunks * args.pipeline_model_parallel_size)
    elif chunks > 1 and args.num_virtual_stages_per_pipeline_rank is None and layout is None:
        args.num_virtual_stages_per_pipeline_rank = chunks
    problems += _take_ramp(args)
    rank_from_environment(args)
    if args.step_batch_size_schedule is not None:
        problems += _smallest_batch(args)
    if args.dry_run:
        dry_run.complete(args)
    problems += validate.before_megatron(args, frozenset(given.values()))
    objection = check_arguments(args)  # Megatron stops at its first one
    derived = validate.after_megatron(args) if objection is None else [objection]
    problems += [text for text in derived if not problems or not any(said in text for said in _SAID_BY_RULES)]
    if problems:
        raise ArgumentProblems(list(dict.fromkeys(problems)))
    checkpoint_rules.take_schedule(args)
    if args.dry_run:
        dry_run.pad_vocabulary(args)
    # Megatron changes some arguments while it builds the model; a checkpoint is compared with these.
    args._resolved = arguments_as_json(args)
    balance.finish(args)
    return args


def _take_ramp(args: argparse.Namespace) -> list[str]:
    """Make `--rampup-batch-size` a schedule of batch sizes; return problems with it."""
    given, args.rampup_batch_size = args.rampup_batch_size, None
    if given is None:
        return []
    words = f"--rampup-batch-size {' '.join(map(str, given))}"
    if args.step_batch_size_schedule is not None:
        return [f"{words} and --step-batch-size-schedule {args.step_batch_size_schedule}: give one of them."]
    try:
        args.step_batch_size_schedule = ramp(given, args.global_batch_size, args.seq_length or 1)
    except ValueError as error:
        return [f"{words}: {error}. It is START INCREMENT SAMPLES, for example 16 8 300000."]
    args.global_batch_size = None  # the schedule has the sizes
    args._notices.append(f'{words} is taken as --step-batch-size-schedule "{args.step_batch_size_schedule}".')
    return []


def _smallest_batch(args: argparse.Namespace) -> list[str]:
    """Take the first batch size of a schedule for what needs one size; return problems with the schedule."""
    given, args.batch_size_steps = args.step_batch_size_schedule, ()
    try:
        args.batch_size_steps = BatchSizes.of(args).steps
        if not args.batch_size_steps or args.batch_size_steps[0][0] != 0:
            raise ValueError("it must begin at 0")
    except ValueError as error:
        args.step_batch_size_schedule = None
        return [f"--step-batch-size-schedule {given}: {error}. Give TOKENS:SAMPLES pairs, for example 0:8 1M:16."]
    if args.global_batch_size is None:
        args.global_batch_size = args.batch_size_steps[0][1]
    return []


def _plan_device(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    """Set the device that estimates assume."""
    if args.plan_device is None:
        on_cpu = args.device == "cpu" and (not args.dry_run or value_of(argv, "--device") == "cpu")
        args.plan_device = "cpu" if on_cpu else devices.DEFAULT
    try:
        devices.find(args.plan_device)
    except ValueError as error:
        return [f"--plan-device {error}"]
    return []


def _set_defaults(
    parser: argparse.ArgumentParser, argv: Sequence[str], problems: list[str]
) -> tuple[platform.Device, str]:
    """Set the defaults of the optimizer, the device and the preset that a command line names; return the device."""
    optimizer = value_of(argv, "--optimizer") or "adam"
    if optimizer in registry.names():
        parser.set_defaults(weight_decay=registry.find(optimizer).hyperparameters().weight_decay)
    requested = value_of(argv, "--device")
    try:
        device, sentence = platform.choose(requested if requested in platform.DEVICE_CHOICES else "auto")
    except ValueError as error:
        device, sentence = "cpu", ""
        problems.append(str(error))
    if device == "cpu":
        parser.set_defaults(**cpu.DEFAULTS)
    if (preset := value_of(argv, "--model")) is not None:
        try:
            parser.set_defaults(**presets.arguments(preset))
        except ValueError as error:
            problems.append(str(error))
    return device, sentence


def _collect(parser: argparse.ArgumentParser, argv: Sequence[str], problems: list[str]) -> argparse.Namespace:
    """Parse; report each bad option, leave it out and parse again until the rest is readable."""
    remaining = list(argv)
    while True:
        try:
            args, unknown = parser.parse_known_args(remaining)
            break
        except argparse.ArgumentError as error:
            problems.append(str(error).removeprefix("argument ") + _nearest_choice(parser, error))
            shorter = without(remaining, (error.argument_name or "").split("/"))
            if shorter == remaining:
                raise ArgumentProblems(problems) from None
            remaining = shorter
    flags = [token for token in unknown if token.startswith("--")]
    for token in flags:
        near = _nearest(token.partition("=")[0], parser._option_string_actions)
        problems.append(f"{token}: no such argument{near or '.'}")
    if unknown and not flags:
        problems.append(f"values that belong to no argument: {' '.join(unknown)}")
    return args


def _nearest_choice(parser: argparse.ArgumentParser, error: argparse.ArgumentError) -> str:
    """The choice that a wrong value is near to, as the end of a message; empty where there is none."""
    action = parser._option_string_actions.get((error.argument_name or "").split("/")[0])
    given = re.match(r"invalid choice: '([^']*)'", error.message)
    return _nearest(given[1], map(str, action.choices)) if given and action and action.choices else ""


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
