# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's writers."""

import torch.distributed as dist
from megatron.training.global_vars import get_wandb_writer


def wandb_run() -> str | None:
    """Id of the wandb run that this job logs to, on every rank. Collective."""
    wandb = get_wandb_writer()
    ids: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ids, wandb.run.id if wandb is not None and wandb.run is not None else None)
    return next((name for name in ids if name), None)
