# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The options that this package adds to Megatron-LM's. Their names are fixed: users' scripts rely on them."""

import argparse

from megatron_async import platform
from megatron_async.optim.corrections import CORRECTIONS
from megatron_async.schedules import SCHEDULES


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one group with every option of this package, except the optimizers' hyper-parameters."""
    group = parser.add_argument_group("megatron_async", "bubble-free pipeline schedules and delayed gradients")
    option = group.add_argument
    option(
        "--device", default="auto", choices=platform.DEVICE_CHOICES, help="Device to train on; auto takes a GPU if any."
    )
    option("--model", metavar="PRESET", help="Model preset; explicit options win. 'list' prints all presets.")
    option(
        "--pipeline-schedule",
        default="1f1b",
        choices=tuple(SCHEDULES),
        help=". ".join(f"{schedule.name}: {schedule.summary}" for schedule in SCHEDULES.values()) + ".",
    )
    option(
        "--gradient-delay",
        metavar="DELAY",
        help="Delay oracle: emulate a delay in one process. N updates for all parameters, 'wpipe', or 'pipedream:P'.",
    )
    option(
        "--staleness-correction",
        default="none",
        choices=CORRECTIONS,
        help="Correction for gradients that are one update old. Works with every optimizer.",
    )
    option("--correction-strength", default=1.0, type=float, help="Strength of the correction (lambda in the paper).")
    option(
        "--optimizer-for",
        action="append",
        metavar="ROLE=NAME",
        help="Optimizer for the parameters of one role, such as embedding=adam. Repeatable; see docs/optimizers.md.",
    )
    option(
        "--undelayed-head",
        action="store_true",
        help="Ablation, with --gradient-delay N: fresh gradients for the output projection.",
    )
    option(
        "--delay-first-moment-only",
        action="store_true",
        help="Ablation, with --gradient-delay N and Adam: fresh gradients for the second moment.",
    )
    option(
        "--log-update-statistics",
        default=0,
        type=int,
        metavar="N",
        help="Log the sizes of updates and corrections by role every N batches; 0 is never.",
    )
    option("--sync-start-iters", default=0, type=int, metavar="N", help="Synchronous batches at the start of training.")
    option(
        "--sync-cooldown-iters", default=0, type=int, metavar="N", help="Synchronous batches at the end of training."
    )
    option(
        "--keep-last",
        type=int,
        metavar="N",
        help="Keep only the N newest complete checkpoints, and multiples of --save-retain-interval.",
    )
    option(
        "--max-consecutive-skips",
        default=10,
        type=int,
        metavar="N",
        help="Stop after N skipped updates in a row. An update is skipped when its gradient is not finite.",
    )
    option("--metrics-file", metavar="FILE", help="JSON lines: one for each batch and each evaluation.")
    option("--trace-file", metavar="FILE", help="Timeline of the pipeline in Chrome's trace format.")
    option(
        "--trace-batches",
        default=12,
        type=int,
        metavar="N",
        help="Batches in the timeline, from the first of this run.",
    )
    option(
        "--emulate-compute-ms",
        metavar="F,B",
        help="Sleep F ms in each forward and B ms in each backward instead of computing. Losses mean nothing.",
    )
    option(
        "--dry-run",
        action="store_true",
        help="Print parameters, memory, schedule and time estimates; train nothing. Needs no data, no second process.",
    )
