# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints: planned with all ranks, written by each, loaded under any layout."""

import argparse
import contextlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, mpu
from megatron.core.dist_checkpointing import serialization as _serialization
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async as _filesystem
from megatron.core.dist_checkpointing.strategies import torch as _torch_dist
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.training import checkpointing as _checkpointing
from megatron.training.checkpointing import load_checkpoint as _load_checkpoint
from megatron.training.training import preprocess_common_state_dict
from torch.distributed.checkpoint import FileSystemReader

from megatron_async.mcore import patches as patches

SHARDED_DATA = (ShardedTensor, ShardedTensorFactory)


def load_common_state(checkpoint: Path) -> dict[str, Any]:
    """What a distributed checkpoint holds besides tensors: the arguments, the iteration."""
    return dist_checkpointing.load_common_state_dict(str(checkpoint))


def _sharding(metadata: dict[str, Any] | None) -> dict[str, Any]:
    return (metadata or {}) | {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}


def load_model_weights(chunk: Any, checkpoint: Path) -> None:
    """Read the weights of a model chunk, as it is split here, from a distributed checkpoint of any layout."""
    metadata = dist_checkpointing.load_content_metadata(str(checkpoint))
    wanted = {"model": chunk.sharded_state_dict(metadata=_sharding(metadata))}
    chunk.load_state_dict(dist_checkpointing.load(wanted, str(checkpoint))["model"])


def save_model_weights(chunk: Any, args: argparse.Namespace, checkpoint: Path) -> None:
    """Write a whole model and its arguments as a distributed checkpoint of iteration 0, without optimizer."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    state = {
        "model": chunk.sharded_state_dict(metadata=_sharding(metadata)),
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
    """Megatron's `load_checkpoint`: iteration and operations so far.

    The distributed optimizer loads into views of the weights, which autograd would refuse.

    Args:
        common: changes what the checkpoint holds besides tensors, before it is merged with them.
    """
    original = _serialization.load_common_state_dict
    _serialization.load_common_state_dict = lambda *values, **options: common(original(*values, **options))
    try:
        iteration, operations = _load_checkpoint(model, optimizer, scheduler)
    finally:
        _serialization.load_common_state_dict = original
    return iteration, operations


class CheckpointPart:
    """This rank's part of a checkpoint that has been planned with all ranks and not been written yet.

    Attributes:
        folder: the checkpoint's.
        file: name of the file that this rank writes into it.
    """

    def __init__(self, writer: "_PartWriter", index: Any) -> None:
        self._writer, self._index = writer, index
        self.folder, self.file = Path(writer.checkpoint_dir), writer.file

    def copy_tensors(self) -> None:
        """Copy every tensor to the host, as it is now: it may change before `write`."""
        self._writer.items = [
            (item, data.to("cpu", copy=True) if isinstance(data, torch.Tensor) else data)
            for item, data in self._writer.items
        ]

    def write(self) -> list[Any]:
        """Write this rank's file and force it to the disk; what `write_index` needs to know about it.

        Tensors are let go one by one. An empty part leaves no file.
        """
        items, self._writer.items = self._writer.items[::-1], []
        results = []
        with contextlib.ExitStack() as opened:
            stream = opened.enter_context((self.folder / self.file).open("wb")) if items else None
            while items:
                item, data = items.pop()
                results.append(
                    _filesystem._write_item(
                        self._writer.transforms,
                        stream,
                        _compact(data) if isinstance(data, torch.Tensor) else data,
                        item,
                        self.file,
                        serialization_format=self._writer.serialization_format,
                    )
                )
            if stream is not None:
                stream.flush()
                os.fsync(stream.fileno())
        return results

    def write_index(self, results: Sequence[list[Any]]) -> None:
        """On rank 0, when all files are there: write the index of what every rank's `write` has returned."""
        self._writer.finish(self._index, list(results))


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host whose storage holds nothing else; a view would be written with all that it is a view of."""
    tensor = tensor.to("cpu")
    whole = tensor.untyped_storage().size() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


class _PartWriter(_filesystem.FileSystemWriterAsync):
    """Keeps what this rank has to write, where Megatron's would prepare its worker threads."""

    file: str
    items: list[tuple[Any, Any]]

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        self.file = f"{plan.storage_data.prefix}0{_filesystem.DEFAULT_SUFFIX}"
        self.items = [(item, _plain_data(planner.resolve_data(item))) for item in plan.items]


def _plain_data(data: Any) -> Any:
    """What is written for a planned item; like Megatron, no quantized tensors."""
    if not isinstance(data, torch.Tensor):
        return data
    return data.dequantize() if "dequantize" in type(data).__dict__ else data.detach()


class _PlanningStrategy(_checkpointing.TorchDistSaveShardedStrategy):
    """Agrees with all ranks on who writes what, and leaves the writing to `part`."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        kept, _, _ = _torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        writer = _PartWriter(checkpoint_dir)
        planner = _torch_dist.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        (_, index, _), *_ = save_state_dict_async_plan(
            _torch_dist.mcore_to_pyt_state_dict(kept, False), writer, planner=planner
        )
        self.part = CheckpointPart(writer, index)


def plan_checkpoint(
    iteration: int, model: list[Any], optimizer: MegatronOptimizer, scheduler: Any, operations: float
) -> CheckpointPart:
    """Megatron's `save_checkpoint` up to the point where tensors would be written. Collective.

    Without its note to wandb and its message of success, since nothing has been written yet.
    """
    _checkpointing.TorchDistSaveShardedStrategy = _PlanningStrategy
    _checkpointing.wandb_utils.on_save_checkpoint_success = lambda *_: None
    context: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        _checkpointing.save_checkpoint(
            iteration,
            model,
            optimizer,
            scheduler,
            operations,
            checkpointing_context=context,
            preprocess_common_state_dict_fn=preprocess_common_state_dict,
        )
    strategy = context["save_strategy"]
    part: CheckpointPart = getattr(strategy, "base_strategy", strategy).part
    return part


def arguments_of(checkpoint: Path) -> dict[str, Any]:
    """Resolved arguments of the run that saved a checkpoint, from Megatron's part of it."""
    state = dist_checkpointing.load_common_state_dict(str(checkpoint))
    return dict(vars(state["args"])) if "args" in state else {}


def check_structure(checkpoint: Path) -> None:
    """Check that every tensor in a checkpoint's index lies within its files.

    Raises:
        ValueError: one does not; the index cannot be read.
    """
    index = FileSystemReader(str(checkpoint)).read_metadata()
    ends: dict[str, int] = {}
    for place in (index.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        size = (checkpoint / name).stat().st_size
        if size < end:
            raise ValueError(f"{checkpoint / name} has {size} bytes, the index needs {end}")
