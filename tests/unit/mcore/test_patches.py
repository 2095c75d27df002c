# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The table of patches: the lines that it answers are still in Megatron, and nothing else is replaced."""

import ast
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

import megatron_async
from megatron_async.mcore.patches import PERMANENT, temporary
from megatron_async.mcore.patches.patch import Patch

MEGATRON = Path(megatron.core.__path__[0]).parent
PACKAGE = Path(megatron_async.__path__[0])


def run(script: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: permanent patches change torch and Megatron for good."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("patch", (*PERMANENT, *temporary.TEMPORARY), ids=lambda patch: patch.target)
def test_the_megatron_line_is_still_there(patch):
    """A patch whose line is gone from the installed Megatron is one to remove."""
    file, _, text = patch.answers.partition(": ")
    assert len(text) > 10 and text in (MEGATRON / file).read_text()


@pytest.mark.parametrize("table", [PERMANENT, temporary.TEMPORARY], ids=["permanent", "temporary"])
def test_targets_are_patched_once(table):
    targets = [patch.target for patch in table]
    assert len(targets) == len(set(targets))


def test_a_temporary_patch_is_undone_after_an_error():
    import string

    patch, original = Patch("string:capwords", "a test", ""), string.capwords
    with pytest.raises(RuntimeError), patch.replaced(lambda capwords: lambda text: capwords(text) + "!"):
        assert string.capwords("so it is") == "So It Is!"
        raise RuntimeError
    assert string.capwords is original


def test_nothing_of_torch_or_megatron_is_replaced_outside_the_table():
    """No assignment to an attribute of an imported module or class, in no file of the package."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                whole = ast.unparse(target)
                if isinstance(target, ast.Attribute) and whole.partition(".")[0] in imported:
                    found.append(f"{file.relative_to(PACKAGE)}:{target.lineno}: {whole}")
    assert not found


BEHAVIOR = """
import gc

import torch
from megatron_async import platform
from megatron_async.mcore import patches

places = {patch.target: patch.locate() for patch in patches.PERMANENT if "cpu" in patch.devices}
before = {target: getattr(owner, name) for target, (owner, name) in places.items()}
platform.activate("cpu")
for target, (owner, name) in places.items():
    assert not callable(before[target]) or getattr(owner, name) is not before[target], target
assert gc.isenabled()
kept = gc.get_freeze_count()  # of objects that the collector does not look at
assert kept > 0
platform.activate("cpu")
assert gc.get_freeze_count() <= kept, "a second call changes nothing"
assert not torch.cuda.is_available()
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
assert torch.arange(3, device=torch.cuda.current_device()).tolist() == [0, 1, 2]
assert torch.ones(2).cuda().device.type == "cpu" and torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
assert torch.ones(2).type() == "torch.cuda.FloatTensor" and torch.ones(2).type(torch.float64).dtype == torch.float64
assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream
stream.wait_stream(stream), stream.record_event().synchronize(), torch.cuda.synchronize()

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
    done = run(BEHAVIOR)
    assert done.stdout.strip().endswith("walked"), done.stderr


ON_CUDA = """
import torch
from megatron_async import platform
from megatron_async.mcore import patches

zeros, current_device = torch.zeros, torch.cuda.current_device
platform.activate("cuda")
assert (torch.zeros, torch.cuda.current_device) == (zeros, current_device)
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as original

assert issubclass(DistributedOptimizer, original) and DistributedOptimizer is not original
platform.activate("cuda")
assert DistributedOptimizer.__mro__[1] is original, "a second call changes nothing"

from types import SimpleNamespace
from megatron.core.tensor_parallel import layers

config, seen = SimpleNamespace(gradient_accumulation_fusion=True), []
def init(self, *, config):
    seen.append(config.gradient_accumulation_fusion)
(head,) = (patch for patch in patches.PERMANENT if "ColumnParallelLinear" in patch.target)
for layers._grad_accum_fusion_available in (False, True):
    head.replace(init)(None, config=config)
assert seen == [False, True] and config.gradient_accumulation_fusion, "Transformer Engine's layers keep theirs"
print("walked")
"""


def test_on_cuda_torch_is_left_alone():
    done = run(ON_CUDA)
    assert done.stdout.strip().endswith("walked"), done.stderr


IMPORT_ALL = """
import importlib, pkgutil
import megatron_async
from megatron_async import platform

platform.activate("cpu")
from megatron_async.mcore import patches
from megatron_async.mcore.patches import temporary

places = [patch.locate() for patch in (*patches.PERMANENT, *temporary.TEMPORARY)]
before = [getattr(owner, name) for owner, name in places]
names = [module.name for module in pkgutil.walk_packages(megatron_async.__path__, "megatron_async.")]
for name in names:
    importlib.import_module(name)
import torch
assert [getattr(owner, name) for owner, name in places] == before, "an import replaced something"
assert len(names) > 30 and not torch.cuda.is_initialized()
print("imported", len(names))
"""


def test_every_module_imports_without_a_gpu():
    done = run(IMPORT_ALL)
    assert done.stdout.startswith("imported"), done.stderr
