# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The causes of idle time in a trace of torch.profiler; the classification itself is tested without a GPU."""

import json
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import idle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable GPU"),
]


def test_a_host_that_sleeps_is_the_cause_of_idle_time(tmp_path):
    matrix = torch.randn(512, 512, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            matrix @ matrix
            torch.cuda.synchronize()
            time.sleep(0.02)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    shares = idle.of_trace(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert shares["host late"] > 0.9 and shares["receive"] == shares["reductions"] == 0.0
    assert sum(shares.values()) == pytest.approx(1.0)
