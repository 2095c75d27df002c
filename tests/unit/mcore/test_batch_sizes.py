# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Batch sizes that change with the samples before."""

import pytest

from megatron_async.mcore.batch_sizes import BatchSizes


@pytest.mark.parametrize("steps", [((0, 4),), ((0, 4), (12, 8)), ((0, 4), (10, 8), (11, 16), (100, 32))])
def test_closed_forms_are_those_of_counting(steps):
    sizes, consumed = BatchSizes(steps), [0]
    while len(consumed) < 30:
        consumed.append(consumed[-1] + sizes.at(consumed[-1]))
    assert [sizes.before(batch) for batch in range(30)] == consumed
    for samples in range(1, consumed[-1] + 1):
        fewest = next(batch for batch, before in enumerate(consumed) if before >= samples)
        assert sizes.batches(samples) == fewest, samples
    for batch, before in enumerate(consumed[:20]):
        later = [number for number in range(batch, 29) if sizes.at(consumed[number]) != sizes.at(before)]
        expected = later[0] - batch if later else None
        change = sizes.batches_to_change(before)
        assert change == expected or (expected is None and before + change * sizes.at(before) > consumed[-2])
