# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Callbacks that log measurements of the update."""

from collections.abc import Mapping

from megatron_async.optim.statistics import UpdateStatistics
from megatron_async.training.callbacks import Callback, CompletedBatch


class StatisticsValues(Callback):
    """Logs `update_rms` by role and `correction_rms` of the measured batches."""

    def __init__(self, statistics: UpdateStatistics) -> None:
        self._statistics = statistics

    def on_batch_end(self, batch: CompletedBatch) -> None:
        if self._statistics.measures(batch.number):
            batch.pending.append(self._statistics.reduce(batch.number))


class StalenessValues(Callback):
    """Logs the staleness of updates that the delay oracle measures."""

    def __init__(self) -> None:
        self._values: dict[int, Mapping[str, float]] = {}

    def __call__(self, batch: int, values: Mapping[str, float]) -> None:
        self._values[batch] = values

    def on_batch_end(self, batch: CompletedBatch) -> None:
        batch.values |= self._values.pop(batch.number, {})
