# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints: planned with all ranks, written by each, loaded under any layout."""

import argparse
import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing, mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies import filesystem_async as _filesystem
from megatron.core.dist_checkpointing.strategies import torch as _torch_dist
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training import checkpointing as _checkpointing
from megatron.training.global_vars import get_args
from megatron.training.training import preprocess_common_state_dict
from torch.distributed.checkpoint import FileSystemReader

from megatron_async.mcore.model import layers_of_gpt_layer
from megatron_async.mcore.patches import temporary

SHARDED_DATA = (ShardedTensor, ShardedTensorFactory)


def arguments_of(checkpoint: Path) -> argparse.Namespace:
    """Resolved arguments of the run that saved a checkpoint; empty if it holds none."""
    state: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(checkpoint))
    return state.get("args", argparse.Namespace())


def _sharding(metadata: dict[str, Any] | None) -> dict[str, Any]:
    return (metadata or {}) | {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def sharded_state(chunk: Any, metadata: dict[str, Any] | None) -> dict[str, Any]:
    """The sharded state of an unwrapped model chunk.

    Where a HybridModel has the names of a GPT, its checkpoints are those of the GPT, which leave out the empty extra
    state of the output layer (core/models/gpt/gpt_model.py: output_layer_extra_state_key).
    """
    state: dict[str, Any] = chunk.sharded_state_dict(metadata=metadata)
    if layers_of_gpt_layer(chunk.config) > 1:
        state.pop("output_layer._extra_state", None)
    return state


def load_model_weights(chunk: Any, checkpoint: Path) -> None:
    """Read the weights of a model chunk, as it is split here, from a distributed checkpoint of any layout."""
    metadata = dist_checkpointing.load_content_metadata(str(checkpoint))
    wanted = {"model": sharded_state(chunk, _sharding(metadata))}
    chunk.load_state_dict(dist_checkpointing.load(wanted, str(checkpoint))["model"])


class Place(NamedTuple):
    """Where a checkpoint has an object: its name, the shape of a grid of such objects, and its place there."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]


class Contents(NamedTuple):
    """All of a checkpoint: whole tensors by name, objects, and the rest, which every rank reads."""

    tensors: dict[str, torch.Tensor]
    objects: dict[Place, Any]
    common: dict[str, Any]


def read(checkpoint: Path) -> Contents:
    """Everything in a distributed checkpoint of any layout, whole."""
    found = load_sharded_metadata(str(checkpoint))
    wanted = {key: item for key, item in found.items() if not key.startswith("common_state/")}
    common = dist_checkpointing.load(dict(wanted), str(checkpoint), validate_access_integrity=False)
    values = {key: (item, common.pop(key)) for key, item in wanted.items()}
    tensors = {key: value for key, (item, value) in values.items() if isinstance(item, ShardedTensor)}
    return Contents(
        tensors,
        {
            Place(item.key, tuple(item.global_shape), tuple(item.global_offset)): value
            for key, (item, value) in values.items()
            if key not in tensors
        },
        common,
    )


def write(contents: Contents, checkpoint: Path) -> None:
    """Write a whole checkpoint from one process."""
    state = dict(contents.common)
    metadata = state.pop("content_metadata", None)
    state |= {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in contents.tensors.items()}
    state |= {str(place): ShardedObject(place.name, value, *place[1:]) for place, value in contents.objects.items()}
    dist_checkpointing.save(state, str(checkpoint), content_metadata=metadata)


def save_model_weights(chunk: Any, args: argparse.Namespace, checkpoint: Path) -> None:
    """Write a whole model and its arguments as a distributed checkpoint of iteration 0, without optimizer."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    state = {
        "model": sharded_state(chunk, _sharding(metadata)),
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
    }
    dist_checkpointing.save(state, str(checkpoint), content_metadata=metadata)


@torch.no_grad()
def load_checkpoint(
    model: list[Any],
    optimizer: MegatronOptimizer,
    scheduler: Any,
    common: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> tuple[int, float]:
    """Megatron's `load_checkpoint`: the iteration and the number of floating-point operations so far.

    Without gradients: the distributed optimizer loads into views of the weights. `common` changes the part of the
    checkpoint that is not tensors, before tensors are merged into it.
    """
    with temporary.COMMON_STATE.replaced(lambda original: lambda *args, **kwargs: common(original(*args, **kwargs))):
        iteration, operations = _checkpointing.load_checkpoint(model, optimizer, scheduler)
    return iteration, operations


class CheckpointPart(_filesystem.FileSystemWriterAsync):
    """This rank's part of a checkpoint that all ranks have planned and none has written yet."""

    folder: Path
    file: str
    """Name of this rank's file in the folder."""
    index: Any
    _items: list[tuple[Any, Any]]

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Keep the planned items; Megatron's writer would prepare its worker threads."""
        self.folder = Path(self.checkpoint_dir)
        self.file = f"{plan.storage_data.prefix}0{_filesystem.DEFAULT_SUFFIX}"
        self._items = [(item, _plain_data(planner.resolve_data(item))) for item in plan.items]

    def copy_tensors(self) -> None:
        """Copy every tensor to the host, so that it may change before `write`."""
        self._items = [
            (item, data.to("cpu", copy=True) if isinstance(data, torch.Tensor) else data) for item, data in self._items
        ]

    def write(self) -> list[Any]:
        """Write this rank's file and return its entries for `write_index`; frees each tensor once it is written.

        An empty part writes no file. OSError if the disk took less than it was given.
        """
        items, self._items = self._items[::-1], []
        if not items:
            return []
        results = []
        with (self.folder / self.file).open("wb") as stream:
            while items:
                item, data = items.pop()
                data = _compact(data) if isinstance(data, torch.Tensor) else data
                results.append(
                    _filesystem._write_item(
                        self.transforms, stream, data, item, self.file, serialization_format=self.serialization_format
                    )
                )
        expected, size = sum(result.size_in_bytes for result in results), (self.folder / self.file).stat().st_size
        if size != expected:
            raise OSError(f"{self.folder / self.file} has {size} bytes instead of {expected}")
        return results

    def write_index(self, results: Sequence[list[Any]]) -> None:
        """On rank 0, when all files are there: write the index of the entries of every rank, and read it back."""
        self.finish(self.index, list(results))
        FileSystemReader(self.folder).read_metadata()


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host whose storage holds nothing else; of a view, torch would save the whole base."""
    tensor = tensor.to("cpu")
    whole = tensor.untyped_storage().size() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _plain_data(data: Any) -> Any:
    """The data of a planned item, quantized tensors dequantized, as in Megatron."""
    if not isinstance(data, torch.Tensor):
        return data
    return data.dequantize() if "dequantize" in type(data).__dict__ else data.detach()


class _PlanningStrategy(_torch_dist.TorchDistSaveShardedStrategy):
    """Plans with all ranks which rank writes which tensor, and leaves the writing to `part`."""

    part: CheckpointPart

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        kept, _, _ = _torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self.part = CheckpointPart(checkpoint_dir)
        planner = _torch_dist.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        (_, self.part.index, _), *_ = save_state_dict_async_plan(
            _torch_dist.mcore_to_pyt_state_dict(kept, False), self.part, planner=planner
        )


def plan_checkpoint(
    iteration: int, model: list[Any], optimizer: MegatronOptimizer, scheduler: Any, operations: float
) -> CheckpointPart:
    """Megatron's `save_checkpoint` up to the point where tensors are written. Collective.

    Its message of success and its wandb artifact are left out, since nothing is written yet.
    """
    args = get_args()
    strategy = wrapped = _PlanningStrategy()
    if args.ckpt_fully_parallel_save:
        if args.ckpt_fully_parallel_save_process_group == "dp":
            group = mpu.get_data_parallel_group(with_context_parallel=True)
        else:
            group = mpu.get_expert_data_parallel_group()
        wrapped = FullyParallelSaveStrategyWrapper(strategy, group, args.ckpt_assume_constant_structure)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, temporary.WANDB_ARTIFACT.replaced(lambda original: lambda *args: None):
        _checkpointing.save_checkpoint(
            iteration,
            model,
            optimizer,
            scheduler,
            operations,
            checkpointing_context={"save_strategy": wrapped},
            preprocess_common_state_dict_fn=preprocess_common_state_dict,
        )
    return strategy.part
