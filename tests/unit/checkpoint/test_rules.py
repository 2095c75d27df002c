# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Arguments that a run may be resumed with, and those that have to do with checkpoints."""

import argparse
from pathlib import Path

import pytest

from megatron_async.checkpoint import folder, manifest, rules

SAVED = {
    **{"num_layers": 4, "optimizer": "adam", "train_iters": 100, "lr": 0.1, "lr_decay_iters": None, "seed": 7},
    "layernorm_epsilon": 1e-6,
    "lr_warmup_init": 0.0,
}


def arguments(**changes: object) -> argparse.Namespace:
    defaults = {
        "no_load_optim": False,
        "freeze_all_layers": False,
        "staleness_correction": "none",
        "override_opt_param_scheduler": False,
        "finetune": False,
        "hybrid_layer_pattern": None,
        "pretrained_checkpoint": None,
        "exit_on_missing_checkpoint": False,
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
        ({"layernorm_epsilon": 1e-5}, "--norm-epsilon is 1e-05"),
        ({"lr": 0.2}, "--lr is 0.2"),
        ({"train_iters": 200}, "--lr-decay-iters is 200"),
        ({"lr_warmup_init": 0.1}, "--lr-warmup-init is 0.1"),
    ],
)
def test_what_cannot_change_is_named(tmp_path, changes, flag):
    (problem,) = rules.differences(arguments(**changes), SAVED, tmp_path)
    assert flag in problem and str(tmp_path) in problem
    assert ("--no-load-optim" in problem) == ("optimizer" in changes)


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


WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "linear"}


@pytest.mark.parametrize("change", [{"lr_wsd_decay_iters": 14}, {"lr_wsd_decay_style": "cosine"}])
def test_another_final_decay_needs_a_decision(tmp_path, change):
    (problem,) = rules.differences(arguments(**WSD | change), SAVED | WSD, tmp_path)
    ((name, value),) = change.items()
    assert f"--{name.replace('_', '-')} is {value}" in problem and f"saved with {WSD[name]}" in problem
    assert "--override-opt-param-scheduler" in problem and "--use-checkpoint-opt-param-scheduler" in problem
    decided = arguments(**WSD | change, override_opt_param_scheduler=True)
    assert list(rules.differences(decided, SAVED | WSD, tmp_path)) == []


def test_a_weight_decay_that_grows_depends_on_the_length_of_the_run(tmp_path):
    saved = SAVED | {"weight_decay_incr_style": "linear", "lr_decay_iters": 100}
    changed = arguments(**saved | {"train_iters": 200})
    assert "--train-iters is 200" in " ".join(rules.differences(changed, saved, tmp_path))


def test_data_may_move_but_not_change(tmp_path):
    saved = SAVED | {"data_path": "['/old/a']", "data_contents": "x"}
    assert list(rules.differences(arguments(data_path=["/new/a"], data_contents="x"), saved, tmp_path)) == []
    (problem,) = rules.differences(arguments(data_path=["/old/a"], data_contents="y"), saved, tmp_path)
    assert "the training data are not those" in problem and "--finetune" in problem
    (problem,) = rules.differences(arguments(data_path=["/new/a"], data_contents=None), saved, tmp_path)
    assert "--data-path is ['/new/a']" in problem


def publish(root: Path, iteration: int, **changes: object) -> None:
    """A checkpoint that consists of its manifest."""
    folder.clean_staging(root)
    path = root / folder.STAGING / folder.name_of(iteration)
    path.mkdir()
    manifest.write(path, manifest.Manifest(iteration, {}, SAVED | changes, {}))
    folder.publish(root, iteration)


def problems(**changes: object) -> list[str]:
    settings = {
        **dict.fromkeys(("save", "load", "ckpt_convert_format", "non_persistent_save_interval", "keep_last")),
        **{"ckpt_format": "torch_dist", "max_consecutive_skips": 10, "async_save": False, "skip_train": False},
    }
    return list(rules.derived_problems(arguments(**settings | changes)))


def test_a_mistyped_folder_does_not_train_from_random_weights(tmp_path):
    here, nowhere = str(tmp_path / "here"), str(tmp_path / "nowhere")
    for start in ({"finetune": True}, {}, {"save": here}, {"save": nowhere, "finetune": True}):
        (problem,) = problems(load=nowhere, **start)
        assert f"--load {nowhere}: no checkpoint there" in problem
    assert problems(load=nowhere, save=nowhere) == [], "a run that continues itself begins without one"
    (problem,) = problems(load=here, save=here, pretrained_checkpoint=nowhere)
    assert f"--pretrained-checkpoint {nowhere}: no checkpoint there" in problem


def test_a_second_start_does_not_begin_again(tmp_path):
    base, new = tmp_path / "base", tmp_path / "new"
    publish(base, 10)
    assert problems(load=str(base), save=str(new), finetune=True) == []
    publish(new, 4)
    for start in ({"load": str(base), "finetune": True}, {"load": str(new), "finetune": True}, {}):
        (problem,) = problems(save=str(new), **start)
        assert f"--save {new} holds a checkpoint of iteration 4" in problem and f"--load {new}" in problem
    assert problems(load=str(new), save=str(new)) == []
    assert problems(load=str(new), save=str(new), pretrained_checkpoint=str(base)) == []
    assert problems(load=str(base), save=str(new)) == [], "10 is ahead of what is there"
    publish(new, 12)
    assert len(problems(load=str(base), save=str(new))) == 1


def test_a_run_that_begins_further_back_saves_elsewhere(tmp_path):
    """Else the next start would load what was left of the abandoned run, and --keep-last would prefer it."""
    there, new = tmp_path / "there", tmp_path / "new"
    publish(there, 10)
    publish(there, 20)
    assert problems(load=str(there), save=str(there), ckpt_step=20) == []
    (problem,) = problems(load=str(there), save=str(there), ckpt_step=10)
    assert "begin at 10" in problem and f"give --load {there} without --ckpt-step" in problem
    assert problems(load=str(there), save=str(new), ckpt_step=10) == []
    publish(new, 14)
    (problem,) = problems(load=str(there), save=str(new), ckpt_step=10)
    assert f"--save {new} holds a checkpoint of iteration 14" in problem


def test_a_checkpoint_without_optimizer_state_says_which_options_load_it(tmp_path):
    publish(tmp_path, 4, no_save_optim=True)
    (problem,) = problems(load=str(tmp_path))
    assert "--no-save-optim" in problem and "--no-load-optim" in problem
    assert problems(load=str(tmp_path), no_load_optim=True) == problems(load=str(tmp_path), finetune=True) == []


def test_the_saved_schedule_can_be_taken(tmp_path):
    publish(tmp_path, 4, lr=0.3)
    args = arguments(load=str(tmp_path), use_checkpoint_opt_param_scheduler=True)
    rules.take_schedule(args)
    assert args.lr == 0.3 and args.lr_decay_iters == 100


def test_options_that_would_do_nothing_are_named():
    (alone,) = problems(async_save=True)
    assert "--async-save without --save" in alone
