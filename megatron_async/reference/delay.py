# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The delay oracle: a delay emulated in one process, with plain copies of the weights.

A parameter with delay d has its gradient of batch b taken at its version b - d, or at the first version of the delayed
phase where that is newer. The update is applied to the newest version. Nothing here is shared with the pipeline's own
weight versions. Delays by part of the layers emulate each schedule.
"""

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.mcore.optimizer import inner_optimizers, mark_delay, master_of
from megatron_async.models.naming import layer_of
from megatron_async.schedules.arguments import oracle_delays


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters with one delay, whose gradients are clipped by one norm.

    Attributes:
        params: the parameters.
        delay: how many updates old their gradients are.
        biases: buffers that Megatron moves by a fixed amount at the end of a batch's backward passes.
    """

    params: tuple[torch.nn.Parameter, ...]
    delay: int
    biases: tuple[torch.Tensor, ...] = ()


class DelayOracle:
    """Lets a synchronous training step take its gradients at older weights.

    Args:
        groups: every parameter of the model in exactly one group.
        one_norm: clip the gradients of all groups by their global norm.
    """

    def __init__(self, groups: Sequence[Group], *, one_norm: bool = False) -> None:
        self._groups, self._one_norm = list(groups), one_norm or len(groups) == 1
        # The last entry is the newest version known; at most delay + 1 are kept.
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
        """Compute forwards and backwards of a batch with each tensor's delayed version; restore afterwards.

        What the computation itself has added to a tensor in the meantime is kept.
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
        """Buffers that move with the weights of each norm group."""
        groups = [list(group.biases) for group in self._groups]
        return [[bias for group in groups for bias in group]] if self._one_norm else groups

    def record(self) -> None:
        """Note the weights after an update as the newest version."""
        for tensor, versions in self._history.items():
            versions.append(tensor.detach().clone())

    def restart(self) -> None:
        """Forget older versions: the next batch is computed with the newest weights."""
        for versions in self._history.values():
            versions.clear()
        self.record()

    @property
    def depth(self) -> int:
        """The largest delay."""
        return max(group.delay for group in self._groups)

    @contextmanager
    def showing(self, age: int) -> Iterator[None]:
        """Let tensors show the storage of their version of `age` updates ago, or of the oldest known.

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
        """Make every version that a delay needs a copy of the present weights."""
        for tensor, versions in self._history.items():
            versions.extend(tensor.detach().clone() for _ in range(versions.maxlen or 1))

    def norm_groups(self, optimizer: MegatronOptimizer) -> list[list[torch.Tensor]] | None:
        """The optimizer's parameters by norm group; None where one global norm clips all of them."""
        if self._one_norm:
            return None
        masters = {id(param): param for inner in inner_optimizers(optimizer) for param in inner.get_parameters()}
        return [
            [master for param in group.params if (master := masters.get(id(master_of(param)))) is not None]
            for group in self._groups
        ]


def make(value: str, model: torch.nn.Module, layers: int, *, undelayed_head: bool = False) -> DelayOracle:
    """The delay oracle of a model that is whole in this process.

    Args:
        value: of `--gradient-delay`, see `schedules.arguments`.
        model: unwrapped.
        layers: number of its layers.
        undelayed_head: give the output projection, the embedding where they are tied, fresh gradients; `value` must
            be a number then.
    """
    if undelayed_head:
        names = [name for name, _ in model.named_parameters()]
        untied = any(name.startswith("output_layer.") for name in names)
        head = _head(untied=untied)
        fresh = [param for name, param in model.named_parameters() if name.startswith(head)]
        others = [param for name, param in model.named_parameters() if not name.startswith(head)]
        delayed = Group(tuple(others), int(value), tuple(_biases(model).values()))
        return DelayOracle([delayed, Group(tuple(fresh), 0)], one_norm=True)
    delays = oracle_delays(value)
    members: list[list[torch.nn.Parameter]] = [[] for _ in delays]
    biases: list[list[torch.Tensor]] = [[] for _ in delays]
    for name, param in model.named_parameters():
        members[_part_of(name, layers, len(delays))].append(param)
    for name, bias in _biases(model).items():
        biases[_part_of(name, layers, len(delays))].append(bias)
    return DelayOracle([Group(tuple(members[part]), delays[part], tuple(biases[part])) for part in range(len(delays))])


def delay_of(args: argparse.Namespace, name: str) -> int:
    """Delay that `--gradient-delay` gives a parameter, by its name in the whole model."""
    if args.undelayed_head and name.startswith(_head(untied=args.untie_embeddings_and_output_weights)):
        return 0
    delays = oracle_delays(args.gradient_delay)
    return delays[_part_of(name, args.num_layers, len(delays))]


def _head(*, untied: bool) -> str:
    return "output_layer." if untied else "embedding.word_embeddings."


def _part_of(name: str, layers: int, parts: int) -> int:
    """Index of the part of the model that a parameter belongs to; all parts have equally many layers."""
    return layer_of(name, layers) * parts // layers


def _biases(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(".expert_bias")}
