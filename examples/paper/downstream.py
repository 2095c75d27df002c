# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Downstream tasks of a table's trained models: conversion to Hugging Face, lm-eval, and a table beside the paper's."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.paper import plan, results
from megatron_async import files

ROOT = Path(__file__).resolve().parents[2]
ENTRY = [sys.executable, "-m", "megatron_async.cli.main"]


def command(words: Sequence[str]) -> None:
    """Run a command of `megatron-async`.

    Raises:
        ValueError: it failed; its own words are on the terminal.
    """
    if subprocess.run([*ENTRY, *words], cwd=ROOT).returncode != 0:
        raise ValueError(f"megatron-async {' '.join(words)} failed")


def accuracies(evaluation: Mapping[str, Any], tasks: Sequence[str]) -> list[float]:
    """Accuracy of each task, normalized by the length of the answers where lm-eval has that."""
    found = {**evaluation["results"], **evaluation.get("groups", {})}
    return [found[task].get("acc_norm,none", found[task].get("acc,none")) for task in tasks]


def markdown(table: plan.Table, scale: plan.Scale, losses: results.Losses) -> str:
    """The models that are evaluated, each above the paper's numbers for its variant."""
    lines = [
        f"# {table.title}: {scale.name}, downstream tasks",
        "",
        "Accuracies of lm-eval, normalized by length where it has that. The paper does not say which it took.",
        "",
        f"| Variant | Source | Loss | {' | '.join(table.tasks)} |",
        f"|---|---|{'---:|' * (1 + len(table.tasks))}",
    ]
    for row, run in _trained(table, scale, losses):
        path = losses.folder(run) / "evaluation.json"
        if path.exists():
            values = accuracies(json.loads(path.read_text(encoding="utf-8")), table.tasks)
            lines.append(_line(run.variant, "ours", losses(run), values))
        if (printed := row.get("downstream", {}).get(scale.name, {}).get(run.variant)) is not None:
            lines.append(_line(run.variant, "paper", row["paper"][scale.name][run.variant], printed))
    return "\n".join(lines) + "\n"


def _line(variant: str, source: str, loss: float | None, values: Sequence[float]) -> str:
    return f"| {' | '.join([variant, source, f'{loss:.3f}', *(f'{value:.3f}' for value in values)])} |"


def _trained(table: plan.Table, scale: plan.Scale, losses: results.Losses) -> Iterator[tuple[plan.Options, plan.Run]]:
    for row in table.rows:
        if (rate := plan.best_rate(plan.grid_runs(table, scale, row), losses)) is not None:
            for run in plan.cells(table, scale, row, rate):
                if losses(run) is not None:
                    yield row, run


def evaluate(table: plan.Table, scale: plan.Scale, losses: results.Losses) -> Path:
    """Convert and evaluate the models that are trained and have no evaluation; return the table's path.

    Raises:
        ValueError: TOKENIZER is not set, or a command failed.
    """
    for _, run in _trained(table, scale, losses):
        folder = losses.folder(run)
        if (folder / "evaluation.json").exists():
            continue
        if not (folder / "hf" / "config.json").exists():
            if "TOKENIZER" not in os.environ:
                raise ValueError("TOKENIZER not set: lm-eval needs the tokenizer of the runs, a Hugging Face folder.")
            words = ["--load", str(folder), "--save", str(folder / "hf"), "--tokenizer", os.environ["TOKENIZER"]]
            command(["convert", "to-hf", *words])
        words = ["--load", str(folder / "hf"), "--output", str(folder / "evaluation.json"), "--tasks", *table.tasks]
        command(["evaluate", *words])
    path = losses.path.parent / f"{table.name}.md"
    files.write_atomically(path, markdown(table, scale, losses))
    return path
