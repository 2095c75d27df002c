# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optimizer steps that go over the weights piece by piece, hooks included.

No optimizer here relates different parameters, so the result is the same. What hooks copy around a step is then as
large as a piece and not as the model.

On a CPU, optimizers that do not relate elements either go over parts of parameters, small enough that all that belongs
to a part stays in the cache from the first of an optimizer's many passes to a correction's last. Memory is then read
and written once, where a step over whole parameters reads and writes it in every pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_async.optim.algorithms.catalogue import OPTIMIZERS

PIECE = 1 << 22
"""Elements of the weights that are stepped on at once, at least one parameter: 16 MiB in fp32, in the order of one
layer. Larger pieces need more memory and are no faster."""

PART = 1 << 19
"""Elements of the weights that are stepped on at once on a CPU by optimizers that relate no elements: 2 MiB in fp32, so
that the ten or so arrays of a step fit into a server's last cache. Each part costs about 0.3 ms of Python."""

# Optimizers that count steps for each parameter. Fused ones from elsewhere may count calls for the whole group.
_COUNT_BY_PARAMETER = ("torch.optim", "megatron_async", "emerging_optimizers")

PREVIOUS_UPDATE = "previous_update"
"""Name of the one buffer that a correction keeps for each parameter, in the optimizer's state and shaped like it: the
previous update, in most cases."""

_PART_OF = "_part_of"


def is_part(param: Tensor) -> bool:
    """Whether a hook has been given a part of a parameter."""
    return hasattr(param, _PART_OF)


def whole(param: Tensor) -> Tensor:
    """The parameter that a hook has been given all of, or a part."""
    parameter: Tensor = getattr(param, _PART_OF, param)
    return parameter


def step_in_pieces(optimizer: torch.optim.Optimizer, piece: int = PIECE, part: int | None = PART) -> None:
    """Let every step of an optimizer go over its parameters piece by piece.

    An optimizer that may count its steps by group, and one that steps in pieces already, is left as it is.

    Args:
        optimizer: its `step` is replaced.
        piece: elements of a piece of whole parameters, at least one parameter.
        part: elements of a piece of an optimizer that relates no elements, for parameters on a CPU; None where hooks
            need whole parameters.
    """
    if not type(optimizer).__module__.startswith(_COUNT_BY_PARAMETER) or "step" in vars(optimizer):
        return
    step_once = optimizer.step
    by_element = part is not None and _relates_no_elements(optimizer)

    def step(closure: Any = None) -> Any:
        assert closure is None, "pieces have no loss of their own"
        groups = optimizer.param_groups
        everything = [group["params"] for group in groups]
        cuts = by_element and all(param.device.type == "cpu" for params in everything for param in params)
        size = part if cuts and part is not None else piece
        try:
            for ranges in _pieces(everything, size, lambda param: cuts and _can_be_cut(optimizer.state, param)):
                with _shown(optimizer, ranges):
                    step_once()
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params

    optimizer.step = step  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements `start` to `stop` of a flattened parameter."""

    param: Tensor
    start: int
    stop: int


def _pieces(
    groups: list[list[Tensor]], size: int, can_be_cut: Callable[[Tensor], bool]
) -> Iterator[list[list[_Range]]]:
    """Parts of lists of parameters of at most `size` elements, or one parameter that cannot be cut."""
    piece: list[list[_Range]] = [[] for _ in groups]
    held = 0
    for position, params in enumerate(groups):
        for param in params:
            length = size if param.numel() > size and can_be_cut(param) else max(1, param.numel())
            for start in range(0, param.numel(), length):
                stop = min(start + length, param.numel())
                if held and held + stop - start > size:
                    yield piece
                    piece, held = [[] for _ in groups], 0
                piece[position].append(_Range(param, start, stop))
                held += stop - start
    if held:
        yield piece


def _relates_no_elements(optimizer: torch.optim.Optimizer) -> bool:
    by_element = (info for info in OPTIMIZERS if info.kind == "elementwise" and not info.whole_tensors)
    return any(type(optimizer) is info.optimizer for info in by_element)


def _can_be_cut(states: dict[Tensor, dict[str, Any]], param: Tensor) -> bool:
    """Whether a parameter has all of its state, and storage in which a range of elements is a view.

    The buffer of a correction is there after the first step, in which optimizers allocate theirs.
    """
    state = states.get(param, {})
    if PREVIOUS_UPDATE not in state or param.grad is None:
        return False
    tensors = [param, param.grad, *(value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0)]
    return all(tensor.shape == param.shape and tensor.is_contiguous() for tensor in tensors)


@contextmanager
def _shown(optimizer: torch.optim.Optimizer, piece: list[list[_Range]]) -> Iterator[None]:
    """Let the optimizer's groups hold a piece, in which parts of parameters have views of their state."""
    cut = []
    for group, ranges in zip(optimizer.param_groups, piece, strict=True):
        group["params"] = []
        for own in ranges:
            if own.stop - own.start == own.param.numel():
                group["params"].append(own.param)
                continue
            part = _part(own)
            optimizer.state[part] = _state_of_part(optimizer.state[own.param], own)
            cut.append((own, part))
            group["params"].append(part)
    try:
        yield
    finally:
        for own, part in cut:
            left = optimizer.state.pop(part)
            if own.stop == own.param.numel():
                numbers = {name: value for name, value in left.items() if not _is_buffer(value)}
                optimizer.state[own.param].update(numbers)


def _part(own: _Range) -> Tensor:
    assert own.param.grad is not None
    part = own.param.detach().view(-1)[own.start : own.stop]
    part.grad = own.param.grad.view(-1)[own.start : own.stop]
    setattr(part, _PART_OF, own.param)
    if hasattr(own.param, "gradient_delay"):
        part.gradient_delay = own.param.gradient_delay  # type: ignore[attr-defined]
    return part


def _state_of_part(state: dict[str, Any], own: _Range) -> dict[str, Any]:
    """Views of a parameter's buffers; counters are copied, so that every part counts the same step."""

    def of_part(value: Any) -> Any:
        if _is_buffer(value):
            return value.view(-1)[own.start : own.stop]
        return value.clone() if isinstance(value, Tensor) else value

    return {name: of_part(value) for name, value in state.items()}


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0
