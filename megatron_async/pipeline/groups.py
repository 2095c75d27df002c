# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Process groups of one purpose alone: what goes through them keeps its order, whatever else is under way."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def own_groups(members: Sequence[Sequence[int]], timeout: timedelta | None = None) -> list[dist.ProcessGroup]:
    """New groups that nobody else uses. Collective over all ranks of the job.

    Args:
        members: global ranks of each group; this rank is in all of them, other ranks may give others.
        timeout: of their operations; None for torch's default.
    """
    given = [tuple(ranks) for ranks in members]
    lists: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, given)
    distinct = sorted({ranks for those in lists for ranks in those})
    made = {ranks: dist.new_group(list(ranks), timeout=timeout) for ranks in distinct}
    return [made[ranks] for ranks in given]
