# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Initial weights that depend on the seed and the parameter's name alone.

Megatron draws initial weights from random states that differ by pipeline, tensor and expert rank, so one seed gives
another model on another layout. Here every weight that Megatron drew is drawn again: the whole matrix from its own
seed, cut to this rank's part. All layouts, and the delay oracle in one process, start from the same model.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megatron_async.mcore.model import replaced_weights
from megatron_async.mcore.parallel import tensor_shards
from megatron_async.models.naming import global_names, ungrouped
from megatron_async.models.vocabulary import true_rows

_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")

Draw = Callable[[torch.Tensor], Any]


class LayoutIndependentInit:
    """Records how Megatron initialized each weight and draws it again by name.

    Args:
        seed: Megatron's `--seed`.
        vocabulary: true size, if known: rows that pad it are 0 and change no other row.
    """

    def __init__(self, seed: int, vocabulary: int | None = None) -> None:
        self._seed, self._vocabulary = seed, vocabulary
        self._noted: list[tuple[torch.Tensor, Draw]] = []

    def watch(self, config: Any) -> None:
        """Record every weight that an init method of a TransformerConfig is applied to while the model is built."""
        self._embedding_draw = config.embedding_init_method or config.init_method
        for name in _METHODS:
            method = getattr(config, name)
            if method is not None:
                setattr(config, name, self._noting(method))

    def redraw(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Draw every recorded weight of the built model chunks again."""
        # By storage, because Transformer Engine wraps weights in new Parameters after their initialization. The list
        # keeps the recorded tensors alive, so no other weight can have taken their memory.
        draws = {_storage(weight): draw for weight, draw in self._noted}
        for chunk in chunks:
            for name, param in global_names(chunk):
                draw = draws.pop(_storage(param), None) or getattr(param, "initial_draw", None)
                if draw is not None and getattr(param, "shared_embedding", False):
                    draw = self._embedding_draw  # Megatron draws the last stage's copy as an output layer
                if draw is not None:
                    assert "norm" not in name, f"{name} is a norm, but was recorded as drawn at random"
                    _fill(param, draw, self._seed_of(name), partial(true_rows, name, vocabulary=self._vocabulary))
        left = sorted(shape for _, shape in draws)
        expected = sorted(shape for chunk in chunks for shape in replaced_weights(chunk))
        assert left == expected, f"initialized weights that the model does not hold: shapes {left}, expected {expected}"
        self._noted.clear()
        return chunks

    def _noting(self, method: Draw) -> Draw:
        def noting(weight: torch.Tensor) -> Any:
            self._noted.append((weight, method))
            return method(weight)

        return noting

    def _seed_of(self, name: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._seed}:{ungrouped(name)}".encode()).digest()[:7], "big")


def _storage(weight: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return weight.data_ptr(), tuple(weight.shape)


@torch.no_grad()
def _fill(param: torch.nn.Parameter, draw: Draw, seed: int, true_rows: Callable[[Sequence[int]], int]) -> None:
    """Draw the whole weight, without the rows that pad it, and keep this rank's part."""
    shape = list(param.shape)
    shards = tensor_shards(param)
    if shards is not None:
        group, dim = shards
        shape[dim] *= group.size()
    whole = torch.zeros(shape, dtype=torch.float32, device=param.device)
    cuda = param.device.type == "cuda"
    with torch.random.fork_rng([param.device] if cuda else []):
        # Init methods take no other generator than the default one.
        (torch.cuda.default_generators[param.device.index] if cuda else torch.default_generator).manual_seed(seed)
        draw(whole[: true_rows(shape)])
    if shards is not None:
        # Megatron cuts a weight of stride s into s blocks, and a fused projection into blocks of these sizes on each
        # rank, and gives every rank its share of each.
        strides = getattr(param, "partition_stride", 1)
        sizes = getattr(param, "partition_sizes", (param.shape[dim] // strides,) * strides)
        blocks = whole.split([size * group.size() for size in sizes], dim=dim)
        whole = torch.cat([block.chunk(group.size(), dim=dim)[group.rank()] for block in blocks], dim=dim)
    param.copy_(whole)
