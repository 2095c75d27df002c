# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 (the platform comes before everything of Megatron)
"""What a batch's reports add up to, and what is written about it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_async import platform

platform.activate("cpu")

from megatron_async.pipeline.update import UpdateReport
from megatron_async.training.callbacks import CompletedBatch
from megatron_async.training.expert_balance import balance, router_losses
from megatron_async.training.log import Log, MetricsFile
from megatron_async.training.metrics import Metrics


def read(rows, layers, losses):
    return balance(layers, losses, torch.tensor(rows).double().view(-1).tolist())


def test_balance_of_two_layers():
    values = read([[1.5, 6, 2, 0, 0], [1.0, 2, 2, 2, 2]], [2, 5], ["load_balancing_loss"])
    assert values == {
        "load_balancing_loss": 1.25,
        "expert_imbalance": 3.0,
        "idle_experts": 2,
        "moe_layers": {
            "2": {"load_balancing_loss": 1.5, "expert_imbalance": 3.0, "idle_experts": 2},
            "5": {"load_balancing_loss": 1.0, "expert_imbalance": 1.0, "idle_experts": 0},
        },
    }


def test_routers_that_add_no_loss():
    assert read([[3, 5]], [1], []) == {
        "expert_imbalance": 1.25,
        "idle_experts": 0,
        "moe_layers": {"1": {"expert_imbalance": 1.25, "idle_experts": 0}},
    }


@pytest.mark.parametrize(
    ("kinds", "strengths", "z", "names"),
    [
        ("aux_loss", 0.01, None, ["load_balancing_loss"]),
        ("aux_loss", 0.0, 0.001, ["z_loss"]),
        ("none", 0.0, None, []),
        (["aux_loss", "seq_aux_loss"], [0.01, 0.02], 0.1, ["load_balancing_loss", "seq_load_balancing_loss", "z_loss"]),
        (["aux_loss", "global_aux_loss"], [0.0, 0.02], None, ["global_load_balancing_loss"]),
        ("sinkhorn", 0.0, 0.0, []),
    ],
)
def test_names_of_router_losses(kinds, strengths, z, names):
    config = SimpleNamespace(moe_router_load_balancing_type=kinds, moe_aux_loss_coeff=strengths, moe_z_loss_coeff=z)
    assert router_losses(config) == names


class Writer:
    def __init__(self):
        self.values = {}

    def add_scalar(self, name, value, iteration):
        self.values[name] = value

    def flush(self):
        pass


@pytest.mark.parametrize("log_layers", [False, True])
def test_file_log_and_writer(tmp_path, capsys, log_layers):
    writer = Writer()
    args = SimpleNamespace(
        log_interval=1,
        moe_per_layer_logging=log_layers,
        global_batch_size=4,
        seq_length=2,
        consumed_train_tokens=0,
        world_size=1,
        iteration=0,
        train_iters=5,
    )
    log = Log(args, metrics_file=MetricsFile(str(tmp_path / "metrics.jsonl"), 0, {}), writer=writer, wandb=None)
    metrics = Metrics(args, flops=1e9, group=SimpleNamespace(size=lambda: 1), log=log)
    values = read([[math.nan, 6, 2, 0, 0], [1.0, 2, 2, 2, 2]], [2, 5], ["load_balancing_loss"])
    metrics.on_losses(0, [{"lm loss": torch.tensor([16.0, 8.0])}])
    metrics.on_batch_end(CompletedBatch(0, [UpdateReport(0, 0, 1.0, False, ())], 0.1, 0.5, None, values))
    metrics.on_train_end(complete=True)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert row["load_balancing_loss"] is None and row["expert_imbalance"] == 3.0
    assert row["moe_layers"]["2"] == {"load_balancing_loss": None, "expert_imbalance": 3.0, "idle_experts": 2}
    assert "| expert imbalance: 3 | idle experts: 2 |" in capsys.readouterr().out
    assert writer.values["expert_imbalance"] == 3.0
    by_layer = {name: value for name, value in writer.values.items() if name.startswith("moe/")}
    assert len(by_layer) == (6 if log_layers else 0)
    if log_layers:
        assert by_layer["moe/expert_imbalance_layer_4"] == 1.0
