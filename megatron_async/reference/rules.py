# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of the delay oracle and its ablations."""

import argparse
from collections.abc import Iterator

from megatron_async.schedules.arguments import oracle_problem, schedule_of


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with parsed values."""
    numbered = args.gradient_delay is not None and args.gradient_delay.isdecimal()
    if args.undelayed_head and not numbered:
        yield (
            f"--undelayed-head needs --gradient-delay N; --gradient-delay is {args.gradient_delay}. Give a number, or "
            "leave --undelayed-head out."
        )
    if args.delay_first_moment_only and (not numbered or args.optimizer != "adam" or args.optimizer_for):
        yield (
            "--delay-first-moment-only needs --gradient-delay N and --optimizer adam for every parameter; "
            f"--gradient-delay is {args.gradient_delay}, --optimizer {args.optimizer}."
        )
    if args.staleness_correction.startswith("raw-") and args.gradient_delay is None:
        yield (
            f"--staleness-correction {args.staleness_correction} corrects the whole gradient before its norm is taken, "
            "which only the delay oracle does. Give --gradient-delay N, or gradient-error-feedback."
        )
    twice = args.delay_first_moment_only or args.log_update_statistics > 0
    if twice and args.gradient_delay is not None and args.num_experts is not None:
        yield (
            "With --gradient-delay, --delay-first-moment-only and --log-update-statistics compute batches twice and "
            f"count the load of --num-experts {args.num_experts} experts twice. Leave them out, or use a dense model."
        )
    if args.gradient_delay is None:
        return
    if (objection := oracle_problem(args.gradient_delay, args.num_layers)) is not None:
        yield objection
    if args.pipeline_model_parallel_size != 1 or not schedule_of(args).megatron:
        yield (
            "--gradient-delay, the delay oracle, needs one pipeline stage and no --pipeline-schedule; "
            f"--pipeline-model-parallel-size is {args.pipeline_model_parallel_size}, --pipeline-schedule is "
            f"{args.pipeline_schedule}."
        )
