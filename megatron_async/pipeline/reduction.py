# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Collectives that follow one another without anybody waiting for them.

A batch's gradients go through several reductions, each needing the one before: data-parallel sum, tied embeddings,
squared norm. They are written as one generator that yields the handles of each step; the executor polls it between
actions and finishes it where the result is due.
"""

from collections.abc import Iterator, Sequence

import torch.distributed as dist

Steps = Iterator[Sequence[dist.Work | None]]


def own_groups(groups: Sequence[dist.ProcessGroup | None]) -> list[dist.ProcessGroup]:
    """New groups of the same ranks, in the same order, that nobody else uses. Collective over all ranks of the job.

    Args:
        groups: this rank is in all of them; other ranks may give others. None stands for all ranks.
    """
    given = [tuple(dist.get_process_group_ranks(group)) for group in groups]
    lists: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, given)
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted({ranks for those in lists for ranks in those})}
    return [made[ranks] for ranks in given]


class Reduction:
    """Drives a generator of collective steps.

    Args:
        steps: yields the handles of the collectives it has started; it is resumed when they are complete. None
            stands for a collective that was not needed.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._pending: list[dist.Work] = []
        self._done = False
        self._advance()

    @property
    def done(self) -> bool:
        return self._done

    def poll(self) -> None:
        """Go on as far as possible without waiting."""
        while not self._done and all(work.is_completed() for work in self._pending):
            self._advance()

    def finish(self) -> None:
        """Go on to the end, waiting where necessary."""
        while not self._done:
            self._advance()

    def _advance(self) -> None:
        for work in self._pending:
            work.wait()
        try:
            self._pending = [work for work in next(self._steps) if work is not None]
        except StopIteration:
            self._pending = []
            self._done = True
