# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Process groups of one purpose each."""

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_async import platform

platform.activate("cpu")

from megatron_async.platform.groups import GroupKey, make_groups  # noqa: E402


def test_groups_have_the_timeout_of_the_job():
    """torch would give them half an hour, and ten minutes with NCCL."""
    limit = timedelta(minutes=7)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        (group,) = make_groups([GroupKey("a test", (0,))])
        assert group._get_backend(torch.device("cpu")).options._timeout == limit
    finally:
        dist.destroy_process_group()
