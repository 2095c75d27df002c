# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every optimizer by its name on the command line.

`register` adds one, also from outside this package, before the command line is parsed. It then has options, a row in
`--optimizer list` and a share in the memory estimate like any other.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from megatron_async.optim.hyperparameters import Hyperparameters
from megatron_async.optim.state import Shape, State, shapes


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer for `--optimizer NAME`.

    Attributes:
        name: value of `--optimizer`.
        optimizer: a torch optimizer that steps on fp32 weights, by (params, **hyperparameters).
        hyperparameters: its dataclass.
        state: name and size of each fp32 buffer; step counters are left out.
        description: one line of summary, the formula in indented lines, advice about the learning rate, links; usually
            the docstring of the module.
        scope: "matrix": it steps on the hidden matrices and leaves other parameters to `--muon-scalar-optimizer`.
            "tensor": it steps on every parameter and needs whole ones, for a norm. "element": it steps on every
            parameter, on each element by itself.
    """

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    hyperparameters: type[Hyperparameters]
    state: State
    description: str | None
    scope: Literal["matrix", "tensor", "element"] = "element"

    def build(self, params: ParamsT, **values: Any) -> torch.optim.Optimizer:
        """The optimizer with these hyper-parameters; those that are not given have their defaults.

        Raises:
            ValueError: naming each value outside its range.
        """
        return self.optimizer(params, **vars(self.hyperparameters(**values)))

    @property
    def text(self) -> list[str]:
        """Lines of the description, without margin."""
        return inspect.cleandoc(self.description or "").splitlines()

    def state_elements(self, shape: Shape) -> int:
        """Elements of the state of a parameter."""
        return sum(torch.Size(size).numel() for size in shapes(self.state, shape).values())

    @property
    def state_per_element(self) -> str:
        """Size of the state for each element of a (rows, columns) matrix, such as "1 + 1/columns"."""
        ratios = {"row": "1/columns", "left": "rows/columns", "right": "columns/rows"}
        counts = Counter(ratios.get(extent, "1") for extent in self.state.values())
        return " + ".join(
            str(count) if term == "1" else term if count == 1 else f"{count} {term}" for term, count in counts.items()
        )


_SPECS: dict[str, OptimizerSpec] = {}


def register(spec: OptimizerSpec) -> None:
    """Make an optimizer available as `--optimizer NAME`.

    Raises:
        ValueError: the name is taken.
    """
    if _SPECS.setdefault(spec.name, spec) is not spec:
        raise ValueError(f"optimizer {spec.name!r} is registered already; give yours another name")


def names() -> list[str]:
    """Names of all optimizers, sorted."""
    return sorted(_SPECS)


def specs() -> list[OptimizerSpec]:
    """All optimizers, sorted by name."""
    return [_SPECS[name] for name in names()]


def find(name: str) -> OptimizerSpec:
    """The optimizer called `name`.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    if name not in _SPECS:
        raise ValueError(f"optimizer {name!r} is unknown; choose one of {', '.join(names())}")
    return _SPECS[name]
