# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The optimizers' hyper-parameters on the command line, generated from the catalogue.

`--NAME-HYPERPARAMETER` with the catalogue's default, such as `--normuon-beta2`; Megatron's own names where it has them.
The learning rate and the weight decay are Megatron's `--lr` and `--weight-decay` for every optimizer.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_async.optim import qk_clip
from megatron_async.optim.algorithms import catalogue
from megatron_async.optim.algorithms.ranges import Choice, Rule, Several
from megatron_async.optim.roles import Assignment, parse_overrides

# Megatron's options that belong to every matrix optimizer, whatever they are called.
_OF_EVERY_MATRIX_OPTIMIZER = ("muon_tp_mode", "muon_split_qkv", "muon_scalar_optimizer")
_OF_MUON = ("muon_extra_scale_factor",)


@dataclass(frozen=True, slots=True)
class Setting:
    """One option: a hyper-parameter of one optimizer, or one value of a hyper-parameter that has several.

    Attributes:
        optimizer: its name.
        hyperparameter: constructor argument.
        index: position in the constructor argument, None for one that is a single value.
        default, rule, source: as in the catalogue.
    """

    optimizer: str
    hyperparameter: str
    index: int | None
    default: Any
    rule: Rule
    source: str

    @property
    def flag(self) -> str:
        name = self.hyperparameter.replace("_", "-")
        if self.index is not None:
            stem, _, of = self.hyperparameter.partition("_")
            name = f"{of + '-' if of else ''}{stem.removesuffix('s')}{self.index + 1}"
        return f"--{self.optimizer}-{name}"

    @property
    def destination(self) -> str:
        return self.flag[2:].replace("-", "_")


def settings(optimizer: str) -> Iterator[Setting]:
    """Options of one optimizer."""
    info = catalogue.find(optimizer)
    for name, hyperparameter in info.hyperparameters.items():
        rule = info.rules[name]
        if name == "weight_decay":
            continue
        if isinstance(rule, Several):
            values = hyperparameter.default
            assert isinstance(values, tuple)
            for index, value in enumerate(values):
                yield Setting(optimizer, name, index, value, rule.each, hyperparameter.source)
        else:
            yield Setting(optimizer, name, None, hyperparameter.default, rule, hyperparameter.source)


def all_settings() -> Iterator[Setting]:
    """Options of every optimizer."""
    for name in catalogue.names():
        yield from settings(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that Megatron does not have, and set the paper's defaults for those it has."""
    group = parser.add_argument_group("optimizers", "hyper-parameters; --optimizer list explains them")
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    for setting in all_settings():
        action = known.get(setting.flag)
        if action is None:
            _add(group, setting)
            continue
        parser.set_defaults(**{action.dest: setting.default})
        if isinstance(setting.rule, Choice) and action.nargs != 0:
            action.choices = [str(value) for value in setting.rule.values]
    known["--optimizer"].choices = catalogue.names()
    known["--optimizer"].help = "Optimizer; 'list' prints all of them with updates, state and sources."
    parser.set_defaults(
        muon_tp_mode="duplicated",  # orthogonalize the whole matrix, not a tensor-parallel block of it
        muon_extra_scale_factor=None,  # 0.2 with the spectral scale, 1 with the others: see docs/optimizers.md
    )


def _add(group: Any, setting: Setting) -> None:
    text = f"{setting.hyperparameter} of {setting.optimizer}, {setting.rule}. Default from: {setting.source}"
    keywords: dict[str, Any] = {"default": setting.default, "help": text.replace("%", "%%")}
    if isinstance(setting.default, bool):
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **keywords)
    elif isinstance(setting.rule, Choice):
        group.add_argument(setting.flag, choices=[str(value) for value in setting.rule.values], **keywords)
    else:
        group.add_argument(setting.flag, type=type(setting.default), **keywords)


def default_weight_decay(optimizer: str) -> float:
    """The paper's weight decay for an optimizer."""
    decay = catalogue.find(optimizer).hyperparameters["weight_decay"].default
    assert isinstance(decay, float)
    return decay


def assignment(args: argparse.Namespace) -> Assignment:
    """Which optimizer steps on which role."""
    overrides, _ = parse_overrides(args.optimizer_for)
    return Assignment(args.optimizer, args.muon_scalar_optimizer, overrides)


def hyperparameters(args: argparse.Namespace, optimizer: str) -> dict[str, Any]:
    """Constructor arguments of an optimizer, the learning rate and the weight decay among them."""
    values: dict[str, Any] = {"lr": args.lr, "weight_decay": args.weight_decay}
    for setting in settings(optimizer):
        value = getattr(args, setting.destination)
        if setting.index is None:
            values[setting.hyperparameter] = value
        else:
            values[setting.hyperparameter] = (*values.get(setting.hyperparameter, ()), value)
    return values


def problems(args: argparse.Namespace, given_destinations: Iterable[str]) -> list[str]:
    """Everything that is wrong with the optimizers' options."""
    overrides, found = parse_overrides(args.optimizer_for)
    found += qk_clip.problems(args, frozenset(given_destinations))
    if args.optimizer not in catalogue.names():
        return found  # the parser reports the name
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        found.append(
            "--optimizer sgd with --use-distributed-optimizer: Megatron's distributed optimizer cannot save "
            "its momentum. Leave --use-distributed-optimizer out, or use another optimizer."
        )
    if args.optimizer in ("adam", "sgd") and any(name != args.optimizer for name in overrides.values()):
        found.append(
            f"--optimizer {args.optimizer} steps on every parameter. Name another optimizer with --optimizer and give "
            f"the roles that {args.optimizer} should have with --optimizer-for ROLE={args.optimizer}."
        )
        return found
    chosen = Assignment(args.optimizer, args.muon_scalar_optimizer, overrides)
    if not chosen.roles_of(args.optimizer):
        found.append(f"--optimizer {args.optimizer}: --optimizer-for gives all of its roles away; leave it one.")
    used = chosen.used()
    given_set = set(given_destinations)
    found += _of_others(args, used, given_set)
    found += _out_of_range(args, used)
    if "soap" in used and args.tensor_model_parallel_size > 1:
        found.append(
            f"--optimizer soap with --tensor-model-parallel-size {args.tensor_model_parallel_size}: its factors need "
            "the whole matrix, which no rank has. Use tensor-parallel size 1, or another optimizer."
        )
    if args.muon_tp_mode == "distributed":
        found.append(
            "--muon-tp-mode distributed is not covered; duplicated gives the same update, blockwise one that depends "
            "on the tensor-parallel size."
        )
    return found


def _of_others(args: argparse.Namespace, used: Sequence[str], given_set: set[str]) -> Iterator[str]:
    """Options of optimizers that this run does not use: they would be ignored."""
    for setting in all_settings():
        if setting.optimizer not in used and setting.destination in given_set:
            valid = ", ".join(own.flag for name in used for own in settings(name))
            yield (
                f"{setting.flag} belongs to --optimizer {setting.optimizer}; this run uses {' and '.join(used)}. Their "
                f"options: {valid}."
            )
    no_matrix = all(catalogue.find(name).kind == "elementwise" for name in used)
    names = (*(_OF_EVERY_MATRIX_OPTIMIZER if no_matrix else ()), *(_OF_MUON if "muon" not in used else ()))
    for destination in names:
        if destination in given_set:
            flag = "--muon-no-split-qkv" if destination == "muon_split_qkv" else "--" + destination.replace("_", "-")
            yield f"{flag} belongs to matrix optimizers; this run uses {' and '.join(used)}. Leave it out."


def _out_of_range(args: argparse.Namespace, used: Sequence[str]) -> Iterator[str]:
    for name in used:
        for setting in settings(name):
            value = getattr(args, setting.destination)
            if value not in setting.rule:
                yield f"{setting.flag} {value}: allowed: {setting.rule}."
    rule = catalogue.find(args.optimizer).rules["weight_decay"]
    if args.weight_decay not in rule:
        yield f"--weight-decay {args.weight_decay}: allowed: {rule}."


def print_list(console: Console | None = None) -> None:
    """Print every optimizer with its update, state, options and sources."""
    console = console or Console()
    table = Table(title="--optimizer", show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("update, state, learning rate, sources", overflow="fold")
    table.add_column("options (default, range)", overflow="fold")
    for info in catalogue.OPTIMIZERS:
        scope = "hidden matrices, the rest by --muon-scalar-optimizer" if info.kind == "matrix" else "all parameters"
        lines = [f"{info.summary}; {scope}.", *info.update]
        lines += [f"State: {', '.join(info.state)}; {info.state_per_element} numbers per element."]
        lines += [f"Learning rate: {info.learning_rate}.", *info.links]
        options = [f"--weight-decay ({default_weight_decay(info.name)}, {info.rules['weight_decay']})"]
        options += [f"{setting.flag} ({setting.default}, {setting.rule})" for setting in settings(info.name)]
        table.add_row(info.name, *("\n".join(cell).replace("[", r"\[") for cell in (lines, options)))
    console.print(table)
