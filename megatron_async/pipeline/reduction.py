# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A chain of collectives that nobody waits for: data-parallel sum, tied embeddings, squared norm.

It is a generator that yields the handles of each step. On GPUs R launches all of it. On CPUs, where the host would
wait, the executor polls it between actions.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist

Steps = Iterator[Sequence[dist.Work | None]]


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


def poll_in_order(reductions: Iterable[Reduction]) -> None:
    """Poll reductions up to the first one that is not done: its collectives come before those of later ones."""
    for reduction in reductions:
        reduction.poll()
        if not reduction.done:
            return
