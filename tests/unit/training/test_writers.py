# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""TensorBoard after a crash; wandb without a folder, without a server, with faults."""

import argparse
import sys
import types
from typing import Any

import pytest

from megatron_async.training import writers
from megatron_async.training.log import Log


def arguments(**changes: Any) -> argparse.Namespace:
    settings = {
        **dict.fromkeys(("save", "load", "wandb_entity", "wandb_save_dir", "tensorboard_dir"), None),
        **{"wandb_project": "p", "wandb_exp_name": "", "rank": 0, "world_size": 1, "iteration": 0},
        **{"finetune": False, "skip_train": False, "tensorboard_queue_size": 1000},
    }
    return argparse.Namespace(**settings | changes)


def test_tensorboard_shows_each_step_once_after_a_crash(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for iteration, steps in ((0, range(1, 7)), (4, range(5, 9))):
        writer = writers.tensorboard(arguments(tensorboard_dir=str(tmp_path), iteration=iteration))
        for step in steps:
            writer.add_scalar("loss", float(step + iteration), step)
        writer.flush()  # the first run ends without closing
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [
        *((step, step) for step in range(1, 5)),
        *((step, step + 4) for step in range(5, 9)),
    ]


def test_faults_of_tensorboard_are_named_once_and_stop_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    assert writers.tensorboard(arguments(tensorboard_dir=str(tmp_path / "file"))) is None
    assert "no TensorBoard: " in capsys.readouterr().out
    writer = writers.tensorboard(arguments(tensorboard_dir=str(tmp_path / "logs")))

    def full(*values: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", full)
    for step in range(3):
        writer.add_scalar("loss", 1.0, step)
    writer.flush()
    assert capsys.readouterr().out.count("TensorBoard: OSError: No space left on device") == 1


def test_the_writer_gets_what_was_asked_for(capsys):
    """`--tensorboard-log-interval` and `--log-validation-ppl-to-tensorboard`."""
    written: list[tuple[str, int]] = []
    writer = types.SimpleNamespace(
        add_scalar=lambda name, value, step: written.append((name, step)), flush=lambda: None
    )
    args = argparse.Namespace(
        **{"iteration": 0, "train_iters": 4, "log_interval": 9, "moe_per_layer_logging": False},
        **{"tensorboard_log_interval": 2, "log_validation_ppl_to_tensorboard": True},
    )
    log = Log(args, metrics_file=None, writer=writer, wandb=None)
    for iteration in range(1, 5):
        log.batch({"iteration": iteration, "skipped": 0, "lm_loss": 2.0, "params_norm": 1.0})
    log.on_evaluated(4, "", 2.0)
    assert written == [
        *[(name, step) for step in (2, 4) for name in ("lm loss", "params-norm")],
        ("lm loss validation", 4),
        ("lm loss validation ppl", 4),
    ]


@pytest.mark.parametrize("wanted", [False, True])
def test_each_layer_of_experts_is_logged_on_request(wanted, capsys):
    """`--moe-per-layer-logging`, with Megatron's names."""
    written: dict[str, float] = {}
    writer = types.SimpleNamespace(
        add_scalar=lambda name, value, step: written.update({name: value}), flush=lambda: None
    )
    args = argparse.Namespace(
        **{"iteration": 0, "train_iters": 1, "log_interval": 9, "moe_per_layer_logging": wanted},
        **{"tensorboard_log_interval": 1, "log_validation_ppl_to_tensorboard": False},
    )
    log = Log(args, metrics_file=None, writer=writer, wandb=None)
    log.batch({"iteration": 1, "skipped": 0, "lm_loss": 2.0, "moe_layers": {"2": {"load_balancing_loss": 1.5}}})
    assert ("moe/load_balancing_loss_layer_1" in written) == wanted


@pytest.fixture
def client(monkeypatch):
    """A stand-in for wandb that records its calls and fails where it is told to."""
    module: Any = types.ModuleType("wandb")
    module.calls, module.fails = [], set()

    def method(name: str) -> Any:
        def call(*values: Any, **options: Any) -> None:
            module.calls.append((name, values, options))
            if name in module.fails and options.get("mode") != "offline":
                raise ConnectionError("no route to the server")

        return call

    for name in ("init", "log", "finish"):
        setattr(module, name, method(name))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_needs_no_save_folder(client, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert writers.wandb(arguments()) is not None
    ((_, _, options),) = client.calls
    assert options["dir"] == "." and "entity" not in options and f"files in {tmp_path}" in capsys.readouterr().out
    assert writers.wandb(arguments(world_size=2)) is None, "one rank logs"


def test_wandb_takes_its_place_and_owner(client, tmp_path):
    """`--wandb-save-dir` and `--wandb-entity`; the folder of `--save` is left alone."""
    writers.wandb(arguments(save=str(tmp_path / "save"), wandb_save_dir=str(tmp_path / "w"), wandb_entity="team"))
    ((_, _, options),) = client.calls
    assert options["dir"] == str(tmp_path / "w") and options["entity"] == "team" and not (tmp_path / "save").exists()


def test_an_unreachable_server_makes_the_run_an_offline_one(client, tmp_path, capsys):
    client.fails = {"init"}
    run = writers.wandb(arguments(save=str(tmp_path)))
    assert [options.get("mode") for _, _, options in client.calls] == [None, "offline"]
    assert "wandb sync" in capsys.readouterr().out and (tmp_path / "wandb").is_dir()
    run.log({"loss": 1.0}, 3)
    assert client.calls[-1] == ("log", ({"loss": 1.0}, 3), {})


def test_faults_are_named_once_and_stop_nothing(client, tmp_path, monkeypatch, capsys):
    run = writers.wandb(arguments(wandb_save_dir=str(tmp_path)))
    client.fails = {"log", "finish"}
    for step in range(3):
        run.log({"loss": 1.0}, step)
    run.finish()
    assert len(client.calls) == 2 and capsys.readouterr().out.count("no route to the server") == 1
    monkeypatch.setitem(sys.modules, "wandb", None)  # the package is missing
    assert writers.wandb(arguments(wandb_save_dir=str(tmp_path))) is None
    assert "no wandb: ModuleNotFoundError" in capsys.readouterr().out
