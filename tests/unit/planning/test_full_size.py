# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Stages of the large presets in full size, as one rank of 64, under fake tensors.

They are built, and hold the bytes that the planner says.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_async import platform

platform.activate("cpu")

from megatron_async.checkpoint import optimizer_state  # noqa: E402
from megatron_async.config import arguments  # noqa: E402
from megatron_async.data.iterators import RunData  # noqa: E402
from megatron_async.mcore import parallel  # noqa: E402
from megatron_async.mcore.optimizer import master_params  # noqa: E402
from megatron_async.optim import ownership  # noqa: E402
from megatron_async.optim.corrections import PREVIOUS_UPDATE  # noqa: E402
from megatron_async.planning.estimate import plan  # noqa: E402
from megatron_async.training import run  # noqa: E402

RUN = (
    "--device cpu --bf16 --pipeline-schedule {schedule} --optimizer muon --staleness-correction error-feedback "
    "--micro-batch-size 1 --global-batch-size 512 --train-iters 10 --lr 1e-3 --eval-iters 0 --no-initialization "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 49151"
)
# 52 layers of the 8B model of arXiv 2504.03624, its sizes, and experts in place of the last two dense blocks.
NEMOTRON = (
    "--model nemotron-h-mini --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-MEM-ME "
    "--hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 "
    "--mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8 --moe-ffn-hidden-size 1024 "
    "--pipeline-model-parallel-size 4"
)
STAGES = {
    "2B, first of 4": (0, "2bw", "--model moe-2b --pipeline-model-parallel-size 4 --expert-model-parallel-size 4"),
    "2B, last of 4, sharded": (
        63,
        "2bw",
        "--model moe-2b --pipeline-model-parallel-size 4 --expert-model-parallel-size 4 --use-distributed-optimizer "
        "--optimizer adam",
    ),
    "2B, last of 4, whole matrices": (
        50,  # Muon's layer-wise optimizer deals out matrices: this rank of the stage owns the head, the largest
        "2bw",
        "--model moe-2b --pipeline-model-parallel-size 4 --expert-model-parallel-size 4 --use-distributed-optimizer",
    ),
    "10B, third of 8": (
        16,
        "2bw-eager",
        "--model moe-10b-hybrid --pipeline-model-parallel-size 8 --expert-model-parallel-size 8",
    ),
    "10B, balanced, last of 8": (
        60,
        "2bw",
        "--model moe-10b-hybrid --pipeline-model-parallel-size 8 --expert-model-parallel-size 8 "
        "--use-distributed-optimizer --optimizer adam --pipeline-balance auto",
    ),
    "Mamba, first of 4": (0, "2bw", NEMOTRON),
    "experts and head, last of 4, wpipe": (
        63,
        "wpipe",
        f"{NEMOTRON} --untie-embeddings-and-output-weights --pipeline-balance auto --optimizer adam",
    ),
    "10B, wpipe, first of 4": (
        0,
        "wpipe",
        "--model moe-10b-hybrid --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--untie-embeddings-and-output-weights",
    ),
}
SHARE = 0.02


def to_bf16(module: torch.nn.Module) -> torch.nn.Module:
    """As `torch.nn.Module.bfloat16`, which cannot exchange fake parameters."""
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None and param.dtype != torch.bfloat16:
                changed = torch.nn.Parameter(param.detach().bfloat16(), param.requires_grad)
                changed.__dict__.update(param.__dict__)
                part._parameters[name] = changed
    return module


@contextmanager
def alone_among_64(monkeypatch: pytest.MonkeyPatch, rank: int) -> Iterator[FakeTensorMode]:
    """One rank whose collectives give it its own values, and tensors without memory."""

    def gather(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    monkeypatch.setattr(run, "initialize", lambda args: parallel.pretend_rank(args, rank))
    monkeypatch.setattr(
        run, "data_iterators", lambda args: RunData([None] * (args.virtual_pipeline_model_parallel_size or 1), [], [])
    )
    monkeypatch.setattr(ownership, "check", lambda ranks, chosen: [])  # needs the shards of the other ranks
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.nn.Module, "bfloat16", to_bf16)
    # Mamba's first values are drawn under it, and it looks at the state of fake generators.
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, ExitStack() as stack:
        stack.callback(parallel.shut_down)
        yield mode


def fake_bytes(mode: FakeTensorMode) -> int:
    """Bytes of all storages of a mode's fake tensors that Python reaches."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), FakeTensor) and thing.fake_mode is mode]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_holds_what_is_planned(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rank, schedule, layout = STAGES[name]
    line = [*RUN.format(schedule=schedule).split(), *layout.split()]
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("RANK", str(rank))
    args = arguments.parse([*line, "--dry-run"])
    stage = rank // (64 // args.pipeline_model_parallel_size)
    planned = plan(args).bytes_by_kind[stage]
    with alone_among_64(monkeypatch, rank) as mode:
        loop = run.build(arguments.parse(line))
        optimizer_state.complete(loop.optimizer)
        for owner, _, param in master_params(loop.optimizer):
            if param.gradient_delay > 0:  # type: ignore[attr-defined]
                owner.state[param][PREVIOUS_UPDATE] = torch.zeros_like(param)
        held = fake_bytes(mode)
        del loop
    expected = sum(size for kind, size in planned.items() if kind != "activations")
    assert held == pytest.approx(expected, rel=SHARE), planned


def test_the_count_sees_a_missing_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind is more than the allowed share of the whole."""
    rank, schedule, layout = STAGES["2B, first of 4"]
    monkeypatch.setenv("WORLD_SIZE", "64")
    args = arguments.parse([*RUN.format(schedule=schedule).split(), *layout.split(), "--dry-run"])
    planned = {kind: size for kind, size in plan(args).bytes_by_kind[rank].items() if kind != "activations"}
    assert min(planned.values()) > 2 * SHARE * sum(planned.values())
