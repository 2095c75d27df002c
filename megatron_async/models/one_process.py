# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A whole model in one process, without training: for conversion and generation.

Megatron's distributed checkpoints (torch_dist) do not depend on the layout: one process reads checkpoints of any
layout, and any layout reads checkpoints of one process.
"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_async.files import write_atomically
from megatron_async.mcore import checkpoint as distributed
from megatron_async.mcore.model import build_model
from megatron_async.mcore.parallel import alone
from megatron_async.models import gpt, hybrid
from megatron_async.platform.cpu import WITHOUT_FUSED_KERNELS

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"


def arguments_of(checkpoint: Path) -> argparse.Namespace:
    """The arguments that a checkpoint was saved with, changed to one process."""
    args = hybrid.on_one_stage(distributed.arguments_of(checkpoint))
    args.world_size = args.tensor_model_parallel_size = 1
    args.expert_model_parallel_size = args.expert_tensor_parallel_size = args.context_parallel_size = 1
    args.data_parallel_size, args.rank = 1, 0
    args.sequence_parallel = args.use_distributed_optimizer = False
    args.recompute_granularity = args.recompute_method = args.recompute_num_layers = args.recompute_modules = None
    args.transformer_impl = "local"
    vars(args).update(WITHOUT_FUSED_KERNELS)
    args.model_class = hybrid.default_class(args)
    return args


@contextmanager
def model(args: argparse.Namespace, *, initialize: bool) -> Iterator[torch.nn.Module]:
    """Build the whole model on this process's device; process groups are destroyed on exit.

    Args:
        args: checked arguments of a run on one process.
        initialize: draw initial weights; otherwise weights are uninitialized memory.
    """
    with alone(args):
        config = gpt.model_config(args)
        config.transformer.perform_initialization = initialize
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunk = build_model(config, groups, None)
        chunk.eval()
        yield chunk


def save(chunk: torch.nn.Module, args: argparse.Namespace, folder: Path) -> Path:
    """Write the model as a release checkpoint, which `--load FOLDER --finetune` starts from; return its folder.

    Raises:
        ValueError: the folder holds checkpoints already.
    """
    if (folder / _TRACKER).exists() or (folder / _RELEASE).exists():
        raise ValueError(f"{folder}: holds checkpoints already; give a new folder.")
    checkpoint = folder / _RELEASE
    checkpoint.mkdir(parents=True)
    try:
        distributed.save_model_weights(chunk, args, checkpoint)
    except BaseException:
        shutil.rmtree(checkpoint)  # or the next attempt would take it for a checkpoint
        raise
    write_atomically(folder / _TRACKER, _RELEASE)
    return checkpoint
