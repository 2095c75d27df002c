# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What check-gpu runs on machines with GPUs, which are imitated: layouts, and command lines that are accepted."""

from pathlib import Path
from unittest import mock

import pytest

from megatron_async import platform

platform.activate("cpu")

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402

from megatron_async.config import arguments  # noqa: E402
from megatron_async.platform import packages  # noqa: E402
from tests.distributed.test_matrix import CELLS  # noqa: E402
from tools import check_gpu  # noqa: E402
from tools.check_gpu import Machine  # noqa: E402


@pytest.mark.parametrize(("gpus", "stages"), [(0, 2), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_stages_of_the_pipeline_that_is_measured(gpus, stages):
    machine = Machine(gpus, Path("unused"))
    assert machine.stages == stages and ("2bw" in machine.schedules) == (stages > 1)


@pytest.mark.parametrize("engine", [True, False], ids=["Transformer Engine", "local"])
@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_the_command_lines_are_accepted(monkeypatch, gpus, engine):
    device = "cuda" if gpus else "cpu"
    monkeypatch.setattr(platform, "choose", lambda requested: (device, "imitated"))
    monkeypatch.setattr(packages.OptionalPackage, "usable", engine)
    if engine:
        monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    machine = Machine(gpus, Path("unused"))
    monkeypatch.setenv("WORLD_SIZE", str(machine.stages))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as a run on GPUs sets it
    for schedule in machine.schedules:
        args = arguments.parse(machine.line(schedule, 19))
        assert (args.device, args.pipeline_model_parallel_size, args.train_iters) == (device, machine.stages, 19)
        assert args.num_layers % machine.stages == 0
        assert args.global_batch_size == 2 * machine.stages * args.micro_batch_size
        assert args.transformer_impl == ("transformer_engine" if gpus and engine else "local")
        assert args.gradient_accumulation_fusion == bool(gpus and engine)


def test_the_emulated_form_takes_cells_of_the_tests():
    assert {CELLS[name].ranks for name in check_gpu._EMULATED_CELLS} == {2}
    assert {CELLS[name].schedule for name in check_gpu._EMULATED_CELLS} == {"1f1b", "2bw", "wpipe"}


def test_sections_that_cannot_run_say_why():
    assert check_gpu.device_tests(Machine(0, Path("unused"))).skipped == "tests/gpu needs a GPU."
    assert "at least two GPUs" in check_gpu.parity(Machine(1, Path("unused"))).skipped


def test_failed_device_tests_are_a_problem_and_the_number_that_passed_is_read():
    def answer(status, text):
        done = mock.Mock(returncode=status, stdout=text)
        with mock.patch.object(check_gpu.subprocess, "run", return_value=done):
            return check_gpu.device_tests(Machine(1, Path("unused")))

    good, bad = answer(0, "6 passed in 3 s"), answer(1, "2 failed, 4 passed in 3 s")
    assert (good.figures["passed"], good.problems) == (6, [])
    assert (bad.figures["passed"], bad.problems) == (4, ["pytest ended with status 1"])
    assert answer(2, "error").figures["passed"] is None
