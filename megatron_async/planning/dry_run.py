# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: print the plan of a run as tables and as one line of JSON."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_async.checkpoint.manifest import arguments_as_json
from megatron_async.planning import memory, parameters
from megatron_async.planning.estimate import Plan, plan
from megatron_async.planning.units import amount, size
from megatron_async.platform.job import ranges
from megatron_async.schedules import StageCosts, make_schedule, simulate
from megatron_async.schedules.render import to_json, to_text

_WIDTH = 160
_LARGEST_PICTURE = 48  # micro-batches of a timeline that still reads well


def run(args: argparse.Namespace) -> None:
    """Print the plan of checked arguments to standard output; the last line is a JSON object."""
    result = plan(args)
    console = Console(file=sys.stdout, width=_WIDTH if not sys.stdout.isatty() else None, highlight=False)
    for part in (_parameter_table(args, result), _stage_table(args, result)):
        console.print(part)
    sys.stdout.write(_picture(result) + "\n\n")
    for line in _times(args, result):
        console.print(line, markup=False, soft_wrap=True)
    sys.stdout.write(json.dumps(as_json(args, result)) + "\n")
    sys.stdout.flush()


def as_json(args: argparse.Namespace, result: Plan) -> dict[str, Any]:
    """The plan as plain data; the names are fixed for users' scripts."""
    schedule = to_json(result.schedule, result.simulated)
    for stage in schedule["stage"]:
        del stage["actions"]
    return {
        "parameters": {"total": result.total, "active": result.active, **result.by_kind},
        "stages": [
            {
                "layers": stage.layers,
                "parameters": parameters.count_by_kind(stage.parameters),
                "parameters_per_rank": sum(parameter.local for parameter in stage.parameters),
                "bytes": {**held, "total": sum(held.values())},
            }
            for stage, held in zip(result.stages, result.bytes_by_kind, strict=True)
        ],
        "schedule": schedule,
        "flops_per_token": result.flops_per_token,
        "seconds_per_batch": result.time.seconds,
        "compute_share": [own / max(result.compute) for own in result.compute],
        "idle": {cause: seconds / result.time.seconds for cause, seconds in result.time.idle.items()},
        "assumptions": result.assumptions,
        "arguments": arguments_as_json(args),
    }


def _parameter_table(args: argparse.Namespace, result: Plan) -> Table:
    table = Table(title=f"{args.model or 'model'}: {args.num_layers} layers, hidden size {args.hidden_size}")
    table.add_column("parameters")
    table.add_column("number", justify="right")
    table.add_column("share", justify="right")
    for kind, count in result.by_kind.items():
        table.add_row(kind.replace("_", " "), f"{count:,}", f"{count / result.total:.1%}")
    table.add_section()
    table.add_row("total", f"{result.total:,}", amount(result.total))
    table.add_row("active for each token", f"{result.active:,}", amount(result.active))
    table.add_row("FLOPs per token, forward and backward", f"{result.flops_per_token:.4g}", "")
    return table


def _stage_table(args: argparse.Namespace, result: Plan) -> Table:
    ranks = f"{args.world_size} devices: tensor {args.tensor_model_parallel_size}, "
    ranks += f"pipeline {args.pipeline_model_parallel_size}, data {args.data_parallel_size}, "
    ranks += f"expert {args.expert_model_parallel_size}"
    table = Table(title=f"{ranks}; memory of each device")
    for heading in ("stage", "layers", "compute", "parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    kinds = [kind for kind in memory.KINDS if any(held[kind] for held in result.bytes_by_kind)]
    for heading in [*(memory.KINDS[kind] for kind in kinds), "total"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for index, (stage, held) in enumerate(zip(result.stages, result.bytes_by_kind, strict=True)):
        whole = sum(parameters.count_by_kind(stage.parameters).values())
        row = [str(index), ranges(stage.layers), f"{result.compute[index] / max(result.compute):.0%}", amount(whole)]
        table.add_row(*row, *(size(held[kind]) for kind in kinds), size(sum(held.values())))
    return table


def _picture(result: Plan) -> str:
    """The timeline, with fewer micro-batches and batches where it would not fit on a screen; F takes 1, B takes 2."""
    schedule = result.schedule
    microbatches, note = schedule.microbatches, ""
    batches = min(schedule.batches, 3)
    if microbatches * batches > _LARGEST_PICTURE and microbatches > schedule.stages:
        microbatches = schedule.stages
        note = f"\n(drawn with {microbatches} micro-batches per batch instead of {schedule.microbatches})"
    drawn = make_schedule(schedule.name, schedule.stages, microbatches, batches)
    return to_text(drawn, simulate(drawn, StageCosts(forward=1.0, backward=2.0))) + note


def _times(args: argparse.Namespace, result: Plan) -> list[str]:
    tokens = args.global_batch_size * args.seq_length
    lines = [
        f"batch: {args.global_batch_size} sequences of {args.seq_length} = {tokens:,} tokens, "
        f"{result.microbatches} micro-batches per pipeline",
        f"bubble share of this run: {result.simulated.steady_bubble_share:.2%} (unequal stages included)",
        f"estimate: {result.time.seconds:.4g} s per batch, {tokens / result.time.seconds:,.0f} tokens/s",
        f"idle: {result.time.idle_text}",
    ]
    if args.train_iters:
        days = args.train_iters * result.time.seconds / 86400
        lines.append(f"{args.train_iters:,} batches, {args.train_iters * tokens:,} tokens: {days:.3g} days")
    return [*lines, "assumptions:", *(f"- {note}" for note in result.assumptions)]
