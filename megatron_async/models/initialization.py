# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Initial weights that depend on the seed and the parameter's name alone.

Megatron draws initial weights from a random state that differs by pipeline, tensor and expert rank, so the same seed
gives another model on another layout. Here each weight that Megatron initialized at random is drawn once more, the
whole matrix from a generator of its own, and cut to this rank's part: every layout, and the one-process reference,
starts from the same model.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_async.mcore.parallel import tensor_parallel_place
from megatron_async.models.naming import global_names
from megatron_async.models.vocabulary import true_rows

_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")

Draw = Callable[[torch.Tensor], Any]


class LayoutIndependentInit:
    """Remembers how Megatron initialized each weight and draws it again by name.

    Args:
        seed: Megatron's `--seed`.
        vocabulary: its true size, where it is known: rows that pad it are 0 and change no other row.
    """

    def __init__(self, seed: int, vocabulary: int | None = None) -> None:
        self._seed, self._vocabulary = seed, vocabulary
        self._draws: dict[int, Draw] = {}

    def watch(self, config: Any) -> None:
        """Note which weight each init method of a TransformerConfig is applied to while the model is built."""
        for name in _METHODS:
            method = getattr(config, name)
            if method is not None:
                setattr(config, name, self._noting(method))

    def redraw(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Draw every noted weight of the built model chunks again."""
        for chunk in chunks:
            for name, param in global_names(chunk):
                draw = self._draws.get(id(param)) or getattr(param, "initial_draw", None)
                if draw is not None:
                    rows = partial(true_rows, name, vocabulary=self._vocabulary)
                    _fill(param, draw, self._generator(name, param.device), rows)
        self._draws.clear()
        return chunks

    def _noting(self, method: Draw) -> Draw:
        def noting(weight: torch.Tensor) -> Any:
            self._draws[id(weight)] = method
            return method(weight)

        return noting

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "big"))


@torch.no_grad()
def _fill(
    param: torch.nn.Parameter, draw: Draw, generator: torch.Generator, rows: Callable[[Sequence[int]], int]
) -> None:
    """Draw the whole weight, as many rows as stand for something, and keep this rank's part of it."""
    world, rank = tensor_parallel_place(param)
    dim = getattr(param, "partition_dim", -1)
    parts = world if getattr(param, "tensor_model_parallel", False) and dim >= 0 else 1
    shape = list(param.shape)
    shape[dim] *= parts
    whole = torch.zeros(shape, dtype=torch.float32, device=param.device)
    with _default_generator(whole.device, generator):
        draw(whole[: rows(shape)])
    if parts > 1:
        # Megatron cuts a weight of stride s into s blocks, and a fused projection into its sections, and gives every
        # rank its share of each.
        size = whole.shape[dim]
        strides = getattr(param, "partition_stride", 1)
        sections = getattr(param, "partition_sections", (size // strides,) * strides)
        whole = torch.cat([section.chunk(parts, dim=dim)[rank] for section in whole.split(sections, dim=dim)], dim=dim)
    param.copy_(whole)


class _default_generator:
    """Let init methods, which take no generator, draw from `generator`; the default one is left as it was."""

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self._default = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        )
        self._generator = generator

    def __enter__(self) -> None:
        self._before = self._default.get_state()
        self._default.set_state(self._generator.get_state())

    def __exit__(self, *error: object) -> None:
        self._default.set_state(self._before)
