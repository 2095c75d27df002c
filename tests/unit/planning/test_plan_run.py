# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The planner's command: the layouts of a job by speed, its best command line, and one row for each of several jobs."""

import itertools
import shlex

import pytest

from megatron_async import platform

platform.activate("cpu")

from megatron_async.cli import plan  # noqa: E402
from megatron_async.config import arguments  # noqa: E402
from megatron_async.planning import devices  # noqa: E402
from megatron_async.planning.search import Search  # noqa: E402

RUN = "--model smollm2-135m --bf16 --global-batch-size 32 --untie-embeddings-and-output-weights"
DELAYED = f"{RUN} --staleness-correction error-feedback"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command; returns its exit status, the rows of its table and the other lines."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("RANK", raising=False)

    def run(options: str, words: str = DELAYED) -> tuple[int, list[list[str]], list[str]]:
        status = plan.main([*options.split(), "--", *words.split()])
        lines = capsys.readouterr().out.splitlines()
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
        return status, rows, lines

    return run


def test_one_job_has_its_layouts_by_speed_and_a_command_line_that_is_accepted(table):
    status, rows, lines = table(
        "--devices 8 --tensor 1 --largest-pipeline 2 --rows 50", f"{DELAYED} --micro-batch-size 1"
    )
    assert status == 0
    seconds = [float(row[6]) for row in rows]
    assert seconds == sorted(seconds)
    assert {"1f1b", "2bw", "2bw-eager", "wpipe"} == {row[1] for row in rows}
    assert any(line.startswith("NVIDIA H100") for line in lines)
    assert any(line.startswith("best of each schedule: ") for line in lines)
    command = shlex.split(lines[lines.index("fastest on 8 devices:") + 1])
    assert command[:5] == "torchrun --nnodes 1 --nproc-per-node 8".split()
    assert plan._problems(command, 8) == ()
    layouts = [row for row in rows if row[-1]]
    for row in layouts:
        pipeline = int(row[2].split(" x ")[0]) * (2 if row[1] == "wpipe" else 1)
        assert len(row[-1].split("|")) == pipeline


def test_a_hybrid_model_is_split_by_its_pattern(table, capsys):
    run = "--model nemotron-h-mini --bf16 --global-batch-size 16 --micro-batch-size 1"
    status, rows, lines = table("--devices 2 --schedules 2bw --tensor 1", run)
    assert status == 0
    assert {row[-1].replace("|", "") for row in rows if row[2].startswith("2 x")} == {"M-M*MEM-M*ME"}
    command = shlex.split(lines[lines.index("fastest on 2 devices:") + 1])
    assert plan._problems(command, 2) == () and command.count("--hybrid-layer-pattern") <= 1
    with pytest.raises(SystemExit):
        plan.main("--devices 2 -- --model nemotron-h-mini --hybrid-layer-pattern M-|M-".split())
    assert "| in --hybrid-layer-pattern belongs to the layout" in capsys.readouterr().err


def test_what_a_search_keeps_belongs_to_a_layout(monkeypatch):
    """Every layout of two jobs has the bound that it has alone."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    words = "--model moe-2b-mini --bf16 --optimizer muon --global-batch-size 64 --device cpu --plan-device h100"
    base = arguments.parse([*words.split(), "--use-distributed-optimizer", "--dry-run"])
    base.staleness_correction = "error-feedback"

    def search() -> Search:
        return Search(base, devices.find("h100"), micro_batches=[1, 2], recompute=[False, True])

    together, found = search(), []
    for number, schedule in itertools.product((8, 16), ("1f1b", "2bw")):
        for layout in together._layouts(number, schedule, [1, 2], 4):
            alone = search()
            alone._models = together._models
            assert together._bound(layout) == alone._bound(layout), layout
            found.append(layout)
    for size in ("pipeline", "tensor", "expert", "data", "micro_batch", "recompute"):
        assert len({getattr(layout, size) for layout in found}) > 1, size


def test_several_jobs_have_the_best_layout_of_each_schedule(table):
    status, rows, lines = table("--devices 2 4 --schedules 1f1b 2bw --tensor 1", f"{DELAYED} --micro-batch-size 2")
    assert status == 0
    assert sorted(row[:2] for row in rows) == [["2", "1f1b"], ["2", "2bw"], ["4", "1f1b"], ["4", "2bw"]]
    assert sum(line.startswith("fastest on") for line in lines) == 2


def test_slow_links_favor_the_eager_schedule(table, tmp_path):
    """Transfers of a tenth of a stage's time: 2bw pays for them, 2bw-eager hides them."""
    slow = tmp_path / "slow.toml"
    known = devices.find("h100")
    values = {name: getattr(known, name) for name in devices.Device.__slots__}
    devices.write(slow, devices.Device(**values | {"name": "slow", "bandwidth_inside": 4e9, "launch_seconds": 1e-9}))
    options = f"--devices 2 --schedules 2bw 2bw-eager --tensor 1 --plan-device {slow}"
    _, rows, lines = table(options, f"{DELAYED} --micro-batch-size 4")
    assert next(row[1] for row in rows if row[2].startswith("2 x")) == "2bw-eager"
    assert any("2bw-eager" in line and "2bw " in line and "(+" in line for line in lines)


def test_options_of_delayed_runs_stay_with_delayed_schedules(table):
    words = f"{DELAYED} --micro-batch-size 1 --correction-strength 0.5 --correct-matrices-only --sync-start-iters 5"
    for schedule, kept in (("2bw", True), ("1f1b", False)):
        status, _, lines = table(f"--devices 2 --tensor 1 --schedules {schedule}", f"{words} --optimizer muon")
        assert status == 0
        assert ("--correct-matrices-only" in lines[-1], "--sync-start-iters 5" in lines[-1]) == (kept, kept)


def test_layouts_that_a_run_refuses_are_named(table):
    status, rows, lines = table("--devices 2 --tensor 1 --schedules 2bw", f"{DELAYED} --correction-strength much")
    assert status == 1 and rows
    assert any("2bw, PP x TP x EP x DP 2 x 1 x 1 x 1" in line and "--correction-strength" in line for line in lines)


def test_what_does_not_fit_and_what_is_wrong_is_said(table, capsys):
    status, rows, lines = table("--devices 2 --tensor 1", f"{RUN} --model moe-10b-hybrid --micro-batch-size 1")
    assert (status, rows) == (1, [])
    assert any("nothing fits. The least is" in line for line in lines)
    for words in (
        "--devices 2",
        "--devices 2 -- --model tiny --pipeline-model-parallel-size 2",
        "--devices 2 -- --model tiny --tensor-model-parallel-size=2",
        "--devices 2 -- --model tiny --decoder-last-pipeline-num-layers 3",
        "--devices 12 -- --model tiny",
        "--devices 0 -- --bf16",
    ):
        with pytest.raises(SystemExit) as wrong:
            plan.main(words.split())
        assert wrong.value.code == 2
    assert plan.main(["--devices", "2", "--", "--model", "none-such"]) == 2
    assert "no such preset" in capsys.readouterr().err
