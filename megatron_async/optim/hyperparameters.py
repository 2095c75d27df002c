# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters of an optimizer: a frozen dataclass whose fields know their range, meaning and source.

The constructor's checks, the command-line options, their help, `--optimizer list` and the tables of
docs/optimizers.md are made from these fields.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, get_args


@dataclass(frozen=True, slots=True)
class Rule:
    """Allowed values: `value in rule` checks one, `str(rule)` describes all.

    Attributes:
        text: the description.
        accepts: the check.
        choices: the values, where there are few.
        each: rule of each number in a tuple.
    """

    text: str
    accepts: Callable[[Any], bool]
    choices: tuple[object, ...] = ()
    each: "Rule | None" = None

    def __contains__(self, value: object) -> bool:
        return self.accepts(value)

    def __str__(self) -> str:
        return self.text


def _is_number(value: object, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


NON_NEGATIVE = Rule("[0, inf)", lambda value: _is_number(value) and 0 <= value < math.inf)
POSITIVE = Rule("(0, inf)", lambda value: _is_number(value) and 0 < value < math.inf)
DECAY = Rule("[0, 1)", lambda value: _is_number(value) and 0 <= value < 1)
"""The rate of a moving average: the weight of its past."""
FACTOR = Rule("(0, inf)", lambda value: value is None or value in POSITIVE)
"""A positive factor, or None for the usual one."""
COUNT = Rule("integers >= 1", lambda value: _is_number(value, int) and value >= 1)


def choice(*values: object) -> Rule:
    """One of a few values."""
    return Rule(" or ".join(map(str, values)), lambda value: value in values, choices=values)


def several(count: int, each: Rule) -> Rule:
    """A tuple of `count` numbers."""

    def accepts(value: Any) -> bool:
        return isinstance(value, tuple | list) and len(value) == count and all(number in each for number in value)

    return Rule(f"{count} values in {each}", accepts, each=each)


FLAG = choice(True, False)
RATES = several(2, DECAY)


def hyperparameter(default: Any, rule: Rule, help: str, source: str, *, in_group: bool = True) -> Any:
    """A field of a `Hyperparameters` class.

    Args:
        default: its value where none is given.
        rule: the allowed values.
        help: its meaning, in a few words.
        source: where the default comes from. "The paper" is arXiv 2606.30634.
        in_group: whether it belongs to the parameter groups and is saved with them. Choices of an implementation do
            not: a resumed run may make others.
    """
    return field(default=default, metadata={"rule": rule, "help": help, "source": source, "in_group": in_group})


def literal(type: Any, default: str, help: str, source: str) -> Any:
    """A field that chooses an implementation, one of the values of a Literal type."""
    return hyperparameter(default, choice(*get_args(type)), help, source, in_group=False)


def epsilon(source: str = "Adam, arXiv 1412.6980") -> Any:
    """The field `eps` of most optimizers."""
    return hyperparameter(1e-8, POSITIVE, "added to the root of the second moment", source)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Base of the hyper-parameters of every optimizer. A subclass is named after its optimizer.

    Raises:
        ValueError: naming each value outside its range, with the range.
    """

    lr: float = hyperparameter(1e-3, NON_NEGATIVE, "learning rate", "--lr is always given")
    weight_decay: float = hyperparameter(
        0.1, NON_NEGATIVE, "decoupled: a step multiplies the weights by 1 - lr weight_decay", "the paper, E"
    )

    def __post_init__(self) -> None:
        problems = [
            f"{own.name} = {value!r}, allowed: {own.metadata['rule']}"
            for own in fields(self)
            if (value := getattr(self, own.name)) not in own.metadata["rule"]
        ]
        if problems:
            raise ValueError(f"{type(self).__name__.removesuffix('Hyperparameters')}: " + "; ".join(problems))

    precision = "fp32"
    """Of the products of matrices in a step."""

    def flops(self, rows: int, columns: int) -> float:
        """Of the products of matrices in a step on one (rows, columns) matrix; 0 for steps on elements."""
        return 0.0

    def group_values(self) -> dict[str, Any]:
        """Those that belong to the parameter groups."""
        return {own.name: getattr(self, own.name) for own in fields(self) if own.metadata["in_group"]}
