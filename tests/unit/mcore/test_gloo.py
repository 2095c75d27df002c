# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Groups share their network threads, and still keep their sums apart."""

import subprocess
import sys
from pathlib import Path

import pytest

# Runs in a process of its own: the patch changes torch for good.
MANY_GROUPS = """
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_async import platform

platform.activate("cpu")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0], timeout=timedelta(seconds=7)) for _ in range(20)]
tensors = [torch.full((2,), float(number)) for number in range(20)]
for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups)]:
    work.wait()
assert [tensor.tolist() for tensor in tensors] == [[float(number)] * 2 for number in range(20)]
backend = groups[0]._get_backend(torch.device("cpu"))
assert isinstance(backend, dist.ProcessGroupGloo) and backend.options._timeout == timedelta(seconds=7)
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print("network threads", names.count("gloo_tcp_loop"))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_twenty_groups_have_four_network_threads():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MANY_GROUPS], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "network threads 4", done.stderr
