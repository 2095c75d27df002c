# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The launch script and its recipes: every optimizer, schedule and delay on top gives arguments that are accepted."""

import functools
import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async import platform

platform.activate("cpu")

from examples import pretrain as launcher  # noqa: E402
from megatron_async.config import arguments  # noqa: E402
from megatron_async.optim import registry  # noqa: E402
from megatron_async.planning.estimate import plan  # noqa: E402
from megatron_async.schedules import SCHEDULES  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "pretrain.py"
DEVICES = {"smollm2-135m": 8, "smollm2-360m": 8, "moe-2b": 8, "moe-10b-hybrid": 64}
STEPS = {"smollm2-135m": 15_000, "smollm2-360m": 20_000, "moe-2b": 47_684, "moe-10b-hybrid": 47_684}
TOKENS = {"smollm2-135m": 2.7e9, "smollm2-360m": 7.2e9, "moe-2b": 50e9, "moe-10b-hybrid": 200e9}
RUN = {"TOKENIZER": "t", "DATA": "d", "SAVE": "s"}
DELAYS = [f"--pipeline-schedule {name}" for name in SCHEDULES] + ["--gradient-delay 1"]
UNTESTED = "not supported with --pipeline-schedule pipedream: --num-experts: untested"


@pytest.fixture(scope="module", autouse=True)
def sources_read_once():
    """Megatron's parser reads the source of its configuration classes for help texts: two thirds of a parse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "getsource", functools.cache(inspect.getsource))
        yield


def launch(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run([sys.executable, SCRIPT, *words], env=environment, capture_output=True, text=True)


def arguments_of(name: str, mode: str, *more: str) -> list[str]:
    done = launch(name, *more, MODE=mode, LAUNCH="echo", **RUN)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def parsed(monkeypatch, name: str, more: str):
    """Checked arguments of a dry run of the recipe's cluster."""
    monkeypatch.setenv("WORLD_SIZE", str(DEVICES[name]))
    recipe = launcher.read(name)
    recipe["arguments"] |= launcher.files(RUN)
    words = launcher.resolve(recipe, "async", more.split())
    return arguments.parse(["--device", "cpu", "--plan-device", "h100", *words, "--dry-run"])


def test_every_recipe_is_tested():
    assert {file.stem for file in launcher.RECIPES.glob("*.toml")} == set(DEVICES)


@pytest.mark.parametrize("name", DEVICES)
def test_both_modes_differ_in_the_schedule_alone(name):
    sync, delayed = arguments_of(name, "sync"), arguments_of(name, "async")
    assert sync[:-2] == delayed[: len(sync) - 2]
    assert sync[-2:] == ["--pipeline-schedule", "1f1b"]
    assert delayed[len(sync) - 2 :] == shlex.split(
        "--pipeline-schedule 2bw --staleness-correction error-feedback --correction-strength 1.0"
    )


@pytest.mark.parametrize("name", DEVICES)
def test_the_stages_are_balanced(name, monkeypatch):
    args = parsed(monkeypatch, name, "")
    assert (args.model, args.train_iters) == (name, STEPS[name])
    assert args.train_iters * args.global_batch_size * args.seq_length == pytest.approx(TOKENS[name], rel=0.01)
    result = plan(args)
    assert result.simulated.steady_bubble_share < 0.07
    assert [layer for stage in result.stages for layer in stage.layers] == list(range(args.num_layers))
    assert max(sum(held.values()) for held in result.bytes_by_kind) < 80 * 2**30


@pytest.mark.parametrize(
    ("name", "schedule"), [*((name, "wpipe") for name in DEVICES), *((name, "pipedream") for name in list(DEVICES)[:2])]
)
def test_a_layout_of_another_schedule_is_balanced(name, schedule, monkeypatch):
    result = plan(parsed(monkeypatch, name, f"--pipeline-schedule {schedule}"))
    assert result.simulated.steady_bubble_share < 0.09


# A quarter of the grid: each optimizer meets each delay on one recipe.
@pytest.mark.parametrize(("number", "name"), enumerate(DEVICES))
@pytest.mark.parametrize(("index", "delay"), enumerate(DELAYS))
def test_every_optimizer_and_delay(number, name, index, delay, monkeypatch):
    for optimizer in registry.names()[(number + index) % 4 :: 4]:
        more = f"--optimizer {optimizer} {delay}"
        if "pipedream" in delay and "moe" in name:
            with pytest.raises(arguments.ArgumentProblems, match=UNTESTED):
                parsed(monkeypatch, name, more)
            continue
        args = parsed(monkeypatch, name, more)
        assert (args.optimizer, args.num_layers) == (optimizer, 30 if name == "smollm2-135m" else args.num_layers)
        if args.gradient_delay is not None:
            assert (args.pipeline_model_parallel_size, args.pipeline_schedule) == (1, "1f1b")
        else:
            assert args.pipeline_model_parallel_size > 1 and args.pipeline_schedule == delay.split()[1]
        corrected = args.pipeline_schedule != "1f1b" or args.gradient_delay is not None
        assert args.staleness_correction == ("error-feedback" if corrected else "none")


def test_settings_are_those_of_the_optimizer_in_use(monkeypatch):
    for optimizer, expected in {
        "muon": {"muon_momentum": 0.99, "adam_beta1": 0.9, "lr": 4e-3, "weight_decay": 0.1},
        "adam": {"muon_momentum": 0.95, "adam_beta1": 0.95, "lr": 4e-3, "weight_decay": 0.1},
        "lion": {"muon_momentum": 0.95, "adam_beta1": 0.9, "lr": 5e-4, "weight_decay": 0.5},
    }.items():
        args = parsed(monkeypatch, "smollm2-135m", f"--optimizer {optimizer}")
        assert {key: getattr(args, key) for key in expected} == expected
        assert args.min_lr == pytest.approx(args.lr / 10)


def test_arguments_on_top_win(monkeypatch):
    monkeypatch.setitem(DEVICES, "smollm2-135m", 6)
    more = "--pipeline-model-parallel-size 3 --global-batch-size 24"
    args = parsed(monkeypatch, "smollm2-135m", f"{more} --lr=1e-3 --optimizer=adam --adam-beta1 0.8")
    assert (args.lr, args.adam_beta1, args.adam_beta2, args.global_batch_size) == (1e-3, 0.8, 0.95, 24)
    assert args.min_lr == pytest.approx(1e-4)
    assert (args.pipeline_model_parallel_size, args.decoder_first_pipeline_num_layers) == (3, None)
    args = parsed(monkeypatch, "smollm2-135m", f"{more} --pipeline-schedule wpipe --staleness-correction none")
    assert (args.pipeline_model_parallel_size, args.decoder_first_pipeline_num_layers) == (3, None)
    assert args.staleness_correction == "none"
    more = "--pipeline-model-parallel-size=2 --pipeline-model-parallel-layout Et*15|t*15L --global-batch-size 24"
    assert plan(parsed(monkeypatch, "smollm2-135m", more)).stages[0].layers == list(range(15))


def test_a_correction_that_is_given_is_kept(monkeypatch):
    with pytest.raises(arguments.ArgumentProblems, match="dc-asgd corrects one-step-old gradients, but"):
        parsed(monkeypatch, "moe-2b", "--pipeline-schedule 1f1b --staleness-correction dc-asgd")
    args = parsed(monkeypatch, "moe-2b", "--staleness-correction dc-asgd --correction-strength 1e4")
    assert (args.staleness_correction, args.correction_strength) == ("dc-asgd", 1e4)


def test_memory_of_the_largest_recipe_beside_the_papers(monkeypatch):
    """Appendix F: about 200M master weights on a GPU, below 1.5 GB more for 2BW and error feedback together.

    That is the mean GPU of a stage, with one copy of every expert. Muon's layer-wise optimizer gives one GPU the whole
    embedding.
    """
    args = parsed(monkeypatch, "moe-10b-hybrid", "--expert-model-parallel-size 16")
    largest = plan(args).bytes_by_kind
    args.use_layer_wise_distributed_optimizer, args.use_distributed_optimizer = False, True
    held = plan(args).bytes_by_kind
    embedding = args.padded_vocab_size * args.hidden_size
    assert embedding < (largest[0]["correction"] - held[0]["correction"]) / 4 + 20e6 < 1.2 * embedding
    assert max(stage["correction"] / 4 for stage in held) < 215e6
    more = [(stage["second_weight_version"] + stage["correction"]) / 1e9 for stage in held]
    assert max(more) < 1.7 and sorted(more)[-2] < 1.5


@pytest.fixture
def started(monkeypatch):
    """Commands and environments that the launcher would replace itself with."""
    found = []
    monkeypatch.setattr(launcher.os, "execvpe", lambda file, command, environment: found.append((command, environment)))
    return found


def test_torchrun_gets_the_cluster_of_the_recipe(started):
    launcher.main(["moe-10b-hybrid"], RUN)
    launcher.main(
        ["moe-2b"], RUN | {"GPUS": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
    )
    (first, _), (second, _) = started
    assert " ".join(first[1:]).startswith(
        "-m torch.distributed.run --nnodes 8 --nproc-per-node 8 --node-rank 0 --rdzv-backend c10d "
        "--rdzv-endpoint localhost:29400 -m megatron_async.pretrain --model moe-10b-hybrid"
    )
    assert "--nnodes 2 --nproc-per-node 4 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint h:9" in " ".join(second)


def test_the_same_command_again_continues_the_run(started):
    launcher.main(["moe-2b"], RUN)
    words = " ".join(started[0][0])
    assert "--data-path d --save s --load s --metrics-file s/metrics.jsonl" in words
    assert "--tokenizer-model t" in words


def test_a_dry_run_plans_for_the_cluster_in_one_process_and_needs_no_files(started):
    assert launcher.main(["moe-10b-hybrid", "--dry-run"], {}) is None
    command, environment = started[0]
    assert command[1:3] == ["-m", "megatron_async.pretrain"] and environment["WORLD_SIZE"] == "64"
    assert not {"--data-path", "--tokenizer-model", "--save", "--load"} & set(command)


def test_a_recipe_may_be_a_file(started, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('[arguments]\noptimizer = "adam"\nlr = 1e-3\ntied = false\n', encoding="utf-8")
    launcher.main([str(mine), "--seed", "1"], RUN | {"LAUNCH": "echo now"})
    command, _ = started[0]
    assert command[:6] == ["echo", "now", "--optimizer", "adam", "--lr", "0.001"] and "--tied" not in command
    assert command[-2:] == ["--seed", "1"]


def test_help():
    asked, wrong = launch("--help"), launch()
    assert (asked.returncode, wrong.returncode) == (0, 2)
    assert asked.stdout == wrong.stderr and "RECIPE [more arguments]" in asked.stdout


def test_problems_are_named_together():
    done = launch("none-such", MODE="fast", TOKENIZER="t")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "MODE=fast: must be sync or async",
        "DATA is not set: a data prefix, without .bin",
        "SAVE is not set: a folder for checkpoints",
        f"RECIPE none-such: no such recipe or file. Known: {', '.join(sorted(DEVICES))}.",
    ]


def test_a_file_with_an_unknown_table_is_refused(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[argument]\nlr = 1\n", encoding="utf-8")
    done = launch(str(mine), **RUN)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown ['argument']" in done.stderr and "'arguments'" in done.stderr
