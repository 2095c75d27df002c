# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Original PipeDream (SOSP 2019): an update after every backward, with stashed weight versions.

Every micro-batch is a batch: R, U and the version rule count micro-batches. Stage s runs P-1-s forwards ahead of its
backwards, so its gradients are P-1-s updates old and P-s versions are alive.
"""

from collections.abc import Iterator

from megatron_async.schedules.actions import Action, Backward, Forward, Reduce, Update
from megatron_async.schedules.segment import Segment


def pipedream(segment: Segment) -> Iterator[Action]:
    """One stream over all micro-batches."""
    numbers = segment.micro_batches
    for microbatch in range(numbers.start, numbers.stop + segment.ahead):
        if microbatch in numbers:
            yield Forward(0, microbatch, segment.versions(microbatch))
        done = microbatch - segment.ahead
        if done in numbers:
            yield Backward(0, done, segment.versions(done))
            yield Reduce(0, done)
            yield Update(0, done)
