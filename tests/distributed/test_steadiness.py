# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Over many batches nothing grows: tensors, Python objects, open handles."""

from benchmarks.processes import Pool


def test_two_hundred_batches_leave_nothing_behind(pool: Pool) -> None:
    for states in pool.run("benchmarks.steadiness:observe", 200, 4, ranks=2, timeout=400):
        first, *later = states[1:]  # the first quarter still fills caches
        for state in later:
            assert state.tensors <= first.tensors + 8  # micro-batches and losses in flight
            assert state.tensor_bytes <= 1.02 * first.tensor_bytes
            assert state.python_bytes <= first.python_bytes + 40_000
            assert state.handles <= first.handles
