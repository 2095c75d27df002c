# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Names of `megatron.training`, and a private one, that this package uses as they are; the id of the wandb run."""
# ruff: noqa: F401

from typing import Any

import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import _IndexReader as IndexReader
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.config import TokenizerConfig
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.global_vars import (
    get_args,
    get_tokenizer,
    get_wandb_writer,
    set_global_variables,
)
from megatron.training.models import GPTModelConfig
from megatron.training.models.gpt import default_layer_spec
from megatron.training.models.hybrid import HybridModelBuilder
from megatron.training.training import num_floating_point_operations, update_train_iters

from megatron_async.mcore.patches import temporary


def set_wandb_writer(writer: Any) -> None:
    """Make `writer` what `get_wandb_writer` returns: an object like wandb's module, or None."""
    temporary.WANDB_WRITER.put(writer)


def wandb_run() -> str | None:
    """Id of the wandb run that this job logs to, on every rank. Collective."""
    wandb = get_wandb_writer()
    ids: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ids, wandb.run.id if wandb is not None and wandb.run is not None else None)
    return next((name for name in ids if name), None)
