# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Arguments that a run may be resumed with, and those that have to do with checkpoints."""

import argparse

import pytest

from megatron_async.checkpoint import rules

SAVED = {"num_layers": 4, "optimizer": "adam", "train_iters": 100, "lr": 0.1, "lr_decay_iters": None, "seed": 7}


def arguments(**changes: object) -> argparse.Namespace:
    defaults = {
        "no_load_optim": False,
        "staleness_correction": "none",
        "override_opt_param_scheduler": False,
        "ckpt_step": None,
        "num_experts": None,
    }
    return argparse.Namespace(
        **(defaults | SAVED | {"use_checkpoint_opt_param_scheduler": False, "lr_decay_iters": None} | changes)
    )


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_layers": 8}, "--num-layers is 8"),
        ({"optimizer": "muon"}, "--optimizer is muon"),
        ({"seed": 8}, "--seed is 8"),
        ({"lr": 0.2}, "--lr is 0.2"),
        ({"train_iters": 200}, "--lr-decay-iters is 200"),
    ],
)
def test_what_cannot_change_is_named(tmp_path, changes, flag):
    (problem,) = rules.differences(arguments(**changes), SAVED, tmp_path)
    assert flag in problem and str(tmp_path) in problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_iters": 200, "lr_decay_iters": 100},
        {"lr": 0.2, "override_opt_param_scheduler": True},
        {"train_iters": 200, "use_checkpoint_opt_param_scheduler": True},
        {"optimizer": "muon", "no_load_optim": True},
    ],
)
def test_what_can_change(tmp_path, changes):
    assert list(rules.differences(arguments(**changes), SAVED, tmp_path)) == []


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ("error-feedback", "error-feedback", False),
        ("none", "weight-prediction", False),
        ("error-feedback", "none", False),
        ("error-feedback", "dc-asgd", True),
        ("weight-prediction", "weight-prediction-updated", True),
        ("weight-prediction", "none", True),
    ],
)
def test_a_correction_does_not_become_another(tmp_path, before, now, refused):
    changes = {"staleness_correction": now, "correction_strength": 0.5}
    saved = SAVED | {"staleness_correction": before, "correction_strength": 1.0}
    problems = list(rules.differences(arguments(**changes), saved, tmp_path))
    assert [f"--staleness-correction is {now}" in problem for problem in problems] == [True] * refused
    assert list(rules.differences(arguments(**changes, no_load_optim=True), saved, tmp_path)) == []


def test_options_that_would_do_nothing_are_named():
    args = argparse.Namespace(
        **dict.fromkeys(("save", "load", "ckpt_convert_format", "non_persistent_save_interval", "keep_last")),
        ckpt_format="torch_dist",
        max_consecutive_skips=10,
        async_save=True,
    )
    (folder,) = rules.derived_problems(args)
    assert "--async-save without --save" in folder
    worker, strategy = rules.ignored({"async_save", "use_persistent_ckpt_worker", "async_strategy"})
    assert "--use-persistent-ckpt-worker" in strategy and "--async-strategy" in worker
