# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The options that this package adds to Megatron-LM's. Their names are fixed: users' scripts rely on them."""

import argparse
from typing import Any

from megatron_async import platform
from megatron_async.optim.corrections import CORRECTIONS
from megatron_async.planning import devices
from megatron_async.schedules import SCHEDULES


def _choice(values: tuple[str, ...], default: str | None, help: str) -> dict[str, Any]:
    return {"choices": values, "default": default, "help": help}


def _text(metavar: str, help: str) -> dict[str, Any]:
    return {"metavar": metavar, "help": help}


def _count(default: int | None, help: str) -> dict[str, Any]:
    return {"type": int, "metavar": "N", "default": default, "help": help}


def _switch(help: str) -> dict[str, Any]:
    return {"action": "store_true", "help": help}


OPTIONS: dict[str, dict[str, Any]] = {
    "--device": _choice(platform.DEVICE_CHOICES, "auto", "Device to train on; auto takes a GPU if there is one."),
    "--model": _text("PRESET", "Model preset; explicit options win; 'list': all."),
    "--model-class": _choice(
        ("gpt", "hybrid"),
        None,
        "Megatron-Core's class of the model; names, numbers, weights and losses are the same. Default: hybrid, or gpt "
        "for arguments that HybridModel does not have.",
    ),
    "--one-document-per-sequence": _switch(
        "A sequence holds one document or a part of it, then padding, whose loss is masked. Needs "
        "--calculate-per-token-loss. Default: documents are packed."
    ),
    "--pipeline-balance": {
        "choices": ("auto", "even", "measured"),
        "help": "Layers of stages: equal times, estimated or measured at the start. Default: auto for delayed "
        "schedules on GPUs.",
    },
    "--plan-device": _text("DEVICE", f"Device of estimates: {', '.join(devices.NAMES)} or a TOML file."),
    "--gradient-delay": _text(
        "DELAY",
        "Delay oracle: delayed gradients on one stage. N updates for all parameters, or the delays of 'wpipe' or "
        "'pipedream:P' (P stages; the first ones hold the remainder of the layers).",
    ),
    "--staleness-correction": _choice(
        CORRECTIONS, "none", "Correction for gradients that are one update old. Works with every optimizer."
    ),
    "--correction-strength": {
        "type": float,
        "metavar": "X",
        "default": 1.0,
        "help": "Strength of the correction (lambda in the paper).",
    },
    "--optimizer-for": {
        "action": "append",
        "metavar": "ROLE=NAME",
        "help": "Optimizer for the parameters of one role, such as embedding=adam. Repeatable; see docs/optimizers.md.",
    },
    "--correct-matrices-only": _switch(
        "Correct the hidden matrices (the roles that Muon steps on) and nothing else; see docs/optimizers.md."
    ),
    "--muon-split-gate-up": _switch(
        "Matrix optimizers: gate and up projection of a gated MLP are two matrices. Default: one, as in Megatron."
    ),
    "--undelayed-head": _switch("Ablation, with --gradient-delay N: fresh gradients for the output projection."),
    "--delay-first-moment-only": _switch(
        "Ablation, with --gradient-delay N and Adam: fresh gradients for the second moment."
    ),
    "--log-update-statistics": _count(
        0, "Log the sizes of updates and corrections by role every N batches; 0 is never."
    ),
    "--log-stage-balance": _count(100, "Log each stage's compute every N batches."),
    "--sync-start-iters": _count(0, "Synchronous batches at the start."),
    "--sync-cooldown-iters": _count(0, "Synchronous batches at the end."),
    "--data-order-samples": _count(
        None,
        "Training samples that the order of the data is drawn for: those of the run, or of the checkpoint's run. A "
        "larger number at the first start lets a run be extended later in the same order.",
    ),
    "--update-launch": _choice(
        ("auto", "at-update", "when-known", "at-once"),
        "auto",
        "Launch of the optimizer step: where the schedule needs it, as soon as the norm is known, or at once with the "
        "reductions. auto: when known on GPUs, else at the update. The numbers are the same.",
    ),
    "--keep-last": _count(
        None, "Keep only the N newest complete checkpoints, and multiples of --save-retain-interval."
    ),
    "--max-consecutive-skips": _count(
        10, "Stop after N skipped updates in a row. An update is skipped when its gradient is not finite."
    ),
    "--metrics-file": _text("FILE", "JSON lines: one for each batch and each evaluation."),
    "--trace-file": _text("FILE", "Timeline of the pipeline in Chrome's trace format."),
    "--trace-batches": _count(12, "Batches in the timeline, from the first of this run."),
    "--explain": _switch("Print the status of the other options given."),
    "--dry-run": _switch(
        "Print parameters, memory, schedule and time estimates; train nothing. Needs no data, no second process."
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one group with every option of this package, except the optimizers' hyper-parameters."""
    group = parser.add_argument_group("megatron_async", "bubble-free pipeline schedules and delayed gradients")
    for flag, keywords in {"--pipeline-schedule": _schedule(), **OPTIONS}.items():
        group.add_argument(flag, **keywords)


def _schedule() -> dict[str, Any]:
    """The schedules that are registered now; other packages may have added some."""
    summaries = ". ".join(f"{schedule.name}: {schedule.summary}" for schedule in SCHEDULES.values())
    return _choice(tuple(SCHEDULES), "1f1b", f"{summaries}.")
