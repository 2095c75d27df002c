# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The delay oracle: delayed gradients on one pipeline stage, with copies of older weights.

The gradient of batch b is taken at version b - d of a parameter with delay d, or at the first version of the delayed
phase; the update is applied to the newest version. The code is independent of the pipeline's weight versions.
"""

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.mcore.optimizer import inner_optimizers, mark_delay, master_of
from megatron_async.models.naming import global_name, global_names, layer_of
from megatron_async.schedules.arguments import oracle_delays


class Group(NamedTuple):
    """Parameters that share a delay (in updates) and a gradient norm, with the router biases of their layers."""

    params: list[torch.nn.Parameter]
    delay: int
    biases: list[torch.Tensor]


class DelayOracle:
    """Older weights for a synchronous training step.

    Args:
        groups: partition of the model's parameters.
        one_norm: clip the gradients of all groups by their global norm.
    """

    def __init__(self, groups: Sequence[Group], *, one_norm: bool = False) -> None:
        self._groups, self._one_norm = list(groups), one_norm or len(groups) == 1
        # Up to delay + 1 versions; the last one is the newest.
        self._history: dict[torch.Tensor, deque[torch.Tensor]] = {
            tensor: deque([tensor.detach().clone()], maxlen=group.delay + 1)
            for group in groups
            for tensor in (*group.params, *group.biases)
        }
        for group in groups:
            for param in group.params:
                mark_delay(param, group.delay)

    @contextmanager
    def stale(self) -> Iterator[None]:
        """Use the delayed versions; restore the newest weights on exit.

        Changes that the computation makes to a tensor (router biases) are kept.
        """
        newest = {tensor: tensor.detach().clone() for tensor in self._history}
        used = {tensor: versions[0] for tensor, versions in self._history.items()}
        with torch.no_grad():
            for tensor, values in used.items():
                tensor.copy_(values)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, values in newest.items():
                    tensor.copy_(values if torch.equal(tensor, used[tensor]) else values + (tensor - used[tensor]))

    def biases(self) -> list[list[torch.Tensor]]:
        """Router biases of each norm group."""
        groups = [group.biases for group in self._groups]
        return [list(chain.from_iterable(groups))] if self._one_norm else groups

    def record(self, *, restart: bool = False) -> None:
        """Record the weights after an update as the newest version, with `restart` as the only one."""
        for tensor, versions in self._history.items():
            if restart:
                versions.clear()
            versions.append(tensor.detach().clone())

    @property
    def depth(self) -> int:
        """The largest delay."""
        return max(group.delay for group in self._groups)

    @contextmanager
    def showing(self, age: int) -> Iterator[None]:
        """Let tensors share the storage of their version `age` updates ago, or of the oldest one.

        A tensor with a smaller delay shows a copy of its oldest version.
        """
        newest = {tensor: tensor.data for tensor in self._history}
        for tensor, versions in self._history.items():
            kept = age < (versions.maxlen or 1)
            tensor.data = versions[max(len(versions) - 1 - age, 0)] if kept else versions[0].clone()
        try:
            yield
        finally:
            for tensor, data in newest.items():
                tensor.data = data

    def fill(self) -> None:
        """Set all versions to copies of the present weights."""
        for tensor, versions in self._history.items():
            versions.extend(tensor.detach().clone() for _ in range(versions.maxlen or 1))

    def norm_groups(self, optimizer: MegatronOptimizer) -> list[list[torch.Tensor]]:
        """Master weights of each norm group; none if one global norm clips all gradients."""
        if self._one_norm:
            return []
        masters = {id(param): param for inner in inner_optimizers(optimizer) for param in inner.get_parameters()}
        return [
            [master for param in group.params if (master := masters.get(id(master_of(param)))) is not None]
            for group in self._groups
        ]


def part_of(layer: int, layers: int, parts: int) -> int:
    """Index of the part that holds a layer. The first `layers % parts` parts hold one layer more than the others."""
    size, remainder = divmod(layers, parts)
    return max(layer // (size + 1), (layer - remainder) // size)


def make(value: str, model: torch.nn.Module, layers: int, *, undelayed_head: bool = False) -> DelayOracle:
    """The delay oracle of an unwrapped model for a value of `--gradient-delay`.

    With `undelayed_head` the output layer (the embedding if tied) has fresh gradients; `value` must be a number.
    """
    untied = any(name.startswith("output_layer.") for name, _ in model.named_parameters())
    delays, index = _parts(value, layers, undelayed_head=undelayed_head, untied=untied)
    groups, rename = [Group([], delay, []) for delay in delays], global_name(model)
    for name, param in global_names(model):
        groups[index(name)].params.append(param)
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            groups[index(rename(name))].biases.append(buffer)
    return DelayOracle(groups, one_norm=undelayed_head)


def delay_of(args: argparse.Namespace, name: str) -> int:
    """Delay that `--gradient-delay` gives a parameter, by its name in the whole model."""
    untied = args.untie_embeddings_and_output_weights
    delays, index = _parts(args.gradient_delay, args.num_layers, undelayed_head=args.undelayed_head, untied=untied)
    return delays[index(name)]


def _parts(
    value: str, layers: int, *, undelayed_head: bool, untied: bool
) -> tuple[Sequence[int], Callable[[str], int]]:
    """The delay of each part of the model, and the index of a parameter's part by its name."""
    delays = oracle_delays(value)
    if undelayed_head:
        head = "output_layer." if untied else "embedding.word_embeddings."
        return (*delays, 0), lambda name: int(name.startswith(head))
    return delays, lambda name: part_of(layer_of(name, layers), layers, len(delays))
