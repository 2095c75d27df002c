# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Idle time by its cause, from timelines and traces that are made up."""

import pytest

from benchmarks import idle
from megatron_async import platform

platform.activate("cpu")

from megatron_async.pipeline.timeline import Span  # noqa: E402


def spans(*parts):
    return [Span(kind, start, duration, {"batch": 0}) for kind, start, duration in parts]


TIMELINE = spans(("F", 0.0, 2.0), ("F", 3.0, 2.0), ("B", 7.0, 2.0), ("U", 9.5, 0.5))


@pytest.mark.parametrize(
    ("first", "last", "shares"),
    [
        (False, False, {"receive": 3.0, "host late": 0.0}),
        (True, False, {"receive": 2.0, "host late": 1.0}),
        (False, True, {"receive": 1.0, "host late": 2.0}),
        (True, True, {"receive": 0.0, "host late": 3.0}),
    ],
)
def test_a_gap_of_a_cpu_rank_belongs_to_the_action_behind_it(first, last, shares):
    found = idle.of_spans(TIMELINE, first=first, last=last)
    expected = {"compute": 6.5, "reductions": 0.5, "rest": 0.0, **shares}
    assert found == pytest.approx({name: seconds / 10.0 for name, seconds in expected.items()})


def kernel(name, start, duration, number):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"correlation": number}}


def launch(number, at, by="cuda_runtime"):
    event = {"ph": "X", "cat": by, "name": "cudaLaunchKernel", "ts": at, "dur": 1.0}
    return event | {"args": {"correlation": number}}


def test_a_gap_of_a_gpu_is_the_hosts_until_the_launch_and_then_that_of_the_message_or_reduction():
    send_receive, reduce = "ncclDevKernel_SendRecv(x)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    events = [
        {"ph": "M", "name": "process_name"},
        kernel("gemm", 0.0, 100.0, 1),
        kernel("gemm", 50.0, 50.0, 2),  # beside the first one, on another stream
        # Launched 10 late; the receive ends at 128.
        *(launch(3, 110.0, by="cuda_driver"), kernel(send_receive, 20.0, 108.0, 90), kernel("gemm", 130.0, 20.0, 3)),
        # Launched in time; the reduction ends at 160, an earlier message at 155.
        *(launch(4, 20.0), kernel(send_receive, 140.0, 15.0, 91), kernel(reduce, 140.0, 20.0, 92)),
        kernel("adam", 160.0, 30.0, 4),
        # Nothing ended in the gap.
        *(launch(5, 180.0), kernel("gemm", 195.0, 5.0, 5)),
    ]
    expected = {"compute": 155.0, "host late": 10.0, "receive": 20.0, "reductions": 10.0, "rest": 5.0}
    assert idle.of_trace(events) == pytest.approx({name: time / 200.0 for name, time in expected.items()})


def test_a_trace_without_kernels_is_an_error():
    with pytest.raises(ValueError, match="no kernels"):
        idle.of_trace([launch(1, 0.0)])
