# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every patch of the CPU platform: what it answers is still in Megatron, and it does what its reason says."""

import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

from megatron_async.platform import cpu

MEGATRON = Path(megatron.core.__path__[0]).parent


@pytest.mark.parametrize("patch", cpu.PATCHES, ids=lambda patch: patch.target)
def test_the_megatron_line_is_still_there(patch):
    """A patch whose line is gone from the installed Megatron is one to remove."""
    file, _, text = patch.answers.partition(": ")
    assert text in (MEGATRON / file).read_text()


def test_targets_are_patched_once():
    targets = [patch.target for patch in cpu.PATCHES]
    assert len(targets) == len(set(targets))


# Runs in a process of its own: the patches change torch for good.
BEHAVIOR = """
import torch
from megatron_async import platform
from megatron_async.platform import cpu

places = {patch.target: patch.locate() for patch in cpu.PATCHES}
before = {target: getattr(owner, name) for target, (owner, name) in places.items()}
platform.activate("cpu")
for target, (owner, name) in places.items():
    assert not callable(before[target]) or getattr(owner, name) is not before[target], target
platform.activate("cpu")  # a second call changes nothing
assert not torch.cuda.is_available()
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
assert torch.arange(3, device=torch.cuda.current_device()).tolist() == [0, 1, 2]
assert torch.ones(2).to("cuda").device.type == "cpu" and torch.ones(2).cuda().device.type == "cpu"
assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
assert torch.ones(2).type() == "torch.cuda.FloatTensor" and torch.ones(2).type(torch.float64).dtype == torch.float64
assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream
stream.wait_stream(stream), stream.record_event().synchronize(), torch.cuda.synchronize()
torch.cuda.nvtx.range_push("x"), torch.cuda.nvtx.range_pop()

torch.cuda.manual_seed(3)
state = torch.cuda.get_rng_state()
first = torch.rand(2)
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(2))

from megatron.core.tensor_parallel import random as tracker

states = tracker.get_cuda_rng_tracker()
states.add("test", 5)
with states.fork("test"):
    inside = torch.rand(2)
torch.manual_seed(5)
assert torch.equal(inside, torch.rand(2)), "the tracker seeds the generator that CPU kernels use"

import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier(device_ids=[0])
received = torch.empty(2)
dist.all_to_all_single(received, torch.ones(2), torch.tensor([2]), torch.tensor([2]))
assert received.tolist() == [1.0, 1.0]
dist.destroy_process_group()
print("walked")
"""


def test_behavior():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", BEHAVIOR], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("walked"), done.stderr


IMPORT_ALL = """
import importlib, pkgutil
import megatron_async
from megatron_async import platform

platform.activate("cpu")
names = [module.name for module in pkgutil.walk_packages(megatron_async.__path__, "megatron_async.")]
for name in names:
    importlib.import_module(name)
import torch
assert len(names) > 30 and not torch.cuda.is_initialized()
print("imported", len(names))
"""


def test_every_module_imports_without_a_gpu():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("imported"), done.stderr
