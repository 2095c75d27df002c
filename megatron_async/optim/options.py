# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Command-line options of the optimizers, made from their hyper-parameters.

`--NAME-HYPERPARAMETER`, such as `--normuon-beta2`; where Megatron has an option of that name, it is used with our
default. `--lr` and `--weight-decay` are Megatron's, for every optimizer.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

from megatron_async.optim import registry
from megatron_async.optim.hyperparameters import Rule
from megatron_async.optim.param_groups import Assignment, parse_overrides


@dataclass(frozen=True, slots=True)
class Option:
    """A hyper-parameter of an optimizer, or one value of a hyper-parameter that has several.

    Attributes:
        optimizer: its name.
        hyperparameter: field of the dataclass.
        index: position in the field, None for one that is a single value.
        default, rule, help, source: as in the field.
    """

    optimizer: str
    hyperparameter: str
    index: int | None
    default: Any
    rule: Rule
    help: str
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


def options_of(optimizer: str) -> Iterator[Option]:
    """Options of one optimizer."""
    for own in fields(registry.find(optimizer).hyperparameters):
        if own.name in ("lr", "weight_decay"):
            continue
        rule, text = own.metadata["rule"], (own.metadata["help"], own.metadata["source"])
        if rule.each is None:
            yield Option(optimizer, own.name, None, own.default, rule, *text)
        else:
            values = enumerate(cast(tuple[float, ...], own.default))
            yield from (Option(optimizer, own.name, index, value, rule.each, *text) for index, value in values)


def all_options() -> Iterator[Option]:
    """Options of every optimizer."""
    for name in registry.names():
        yield from options_of(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that Megatron does not have, and set our defaults for those it has."""
    group = parser.add_argument_group("optimizers", "hyper-parameters; see --optimizer list")
    known = dict(parser._option_string_actions)
    for option in all_options():
        action = known.get(option.flag)
        if action is None:
            _add(group, option)
            continue
        parser.set_defaults(**{action.dest: option.default})
        if option.rule.choices and action.nargs != 0:
            action.choices = [str(value) for value in option.rule.choices]
    known["--optimizer"].choices = registry.names()
    known["--optimizer"].help = "Optimizer. 'list' prints all of them with formula, state, options and sources."
    parser.set_defaults(muon_tp_mode="duplicated")  # orthogonalize whole matrices, not tensor-parallel shards


def _add(group: Any, option: Option) -> None:
    text = f"{option.help}; {option.rule}. Source of the default: {option.source}"
    keywords: dict[str, Any] = {"default": option.default, "help": text.replace("%", "%%")}
    if isinstance(option.default, bool):
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **keywords)
    elif option.rule.choices:
        group.add_argument(option.flag, choices=[str(value) for value in option.rule.choices], **keywords)
    else:
        group.add_argument(option.flag, type=float if option.default is None else type(option.default), **keywords)


def assignment(args: argparse.Namespace) -> Assignment:
    """Optimizer of each role in a run."""
    overrides, _ = parse_overrides(args.optimizer_for)
    return Assignment(args.optimizer, args.muon_scalar_optimizer, overrides)


def splits(args: argparse.Namespace, scope: str = "matrix") -> dict[str, bool]:
    """How optimizers of a scope divide weights into matrices: keyword arguments of `param_groups.layouts`."""
    matrix = scope == "matrix"
    return {
        "split_fused": matrix and args.muon_split_qkv,
        "split_gate_up": matrix and args.muon_split_gate_up,
        "gather": not matrix or args.muon_tp_mode == "duplicated",
    }


def hyperparameters(args: argparse.Namespace, optimizer: str) -> dict[str, Any]:
    """Hyper-parameters of an optimizer in a run."""
    values: dict[str, Any] = {"lr": args.lr, "weight_decay": args.weight_decay}
    for option in options_of(optimizer):
        value = getattr(args, option.destination)
        if option.index is None:
            values[option.hyperparameter] = value
        else:
            values[option.hyperparameter] = (*values.get(option.hyperparameter, ()), value)
    return values
