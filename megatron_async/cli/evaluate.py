# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Evaluate a Hugging Face folder with lm-eval, by default on the eight tasks of arXiv 2606.30634, table 4.

    megatron-async convert to-hf --load runs/mine/checkpoints --save runs/mine/hf --tokenizer FOLDER
    megatron-async evaluate --load runs/mine/hf --output runs/mine/evaluation.json

lm-eval downloads the tasks' data unless they are in the cache of datasets. It is not part of the default install:
pip install 'megatron_async[evaluate]'.
"""

import argparse
import difflib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_async.files import write_atomically

PAPER_TASKS = ("arc_challenge", "arc_easy", "copa", "hellaswag", "mmlu", "openbookqa", "piqa", "winogrande")
"""Tasks of the paper's table 4. It states neither numbers of examples in the prompt nor which accuracy it takes."""


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron-async evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=Path, required=True, help="Hugging Face folder with weights and tokenizer")
    parser.add_argument("--tasks", nargs="+", default=list(PAPER_TASKS), metavar="TASK", help="default: the paper's")
    parser.add_argument("--include", type=Path, help="folder with lm-eval tasks of your own (YAML)")
    parser.add_argument("--shots", type=int, help="examples in the prompt (default: each task's own)")
    parser.add_argument("--limit", type=int, help="first N documents of each task only, for a trial")
    parser.add_argument("--batch-size", default="auto", help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: lm-eval's choice)")
    parser.add_argument("--output", type=Path, help="JSON file for lm-eval's results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 if something stands in the way; every reason is printed."""
    options = _parse(argv)
    problems = list(_problems(options))
    if not problems:
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=None if options.include is None else str(options.include))
        problems = list(_unknown(options.tasks, manager.all_tasks))
    if problems:
        lines = "\n".join(f"  - {line}" for line in problems)
        print(f"megatron-async evaluate: nothing was evaluated\n{lines}", file=sys.stderr)
        return 2
    results = _evaluate(options, manager)
    if options.output is not None:
        write_atomically(options.output, json.dumps(results, indent=2, default=str) + "\n")
    Console().print(result_table(results))
    return 0


def _problems(options: argparse.Namespace) -> Iterator[str]:
    if importlib.util.find_spec("lm_eval") is None:
        yield "lm-eval is not installed: pip install 'megatron_async[evaluate]'."
    if not (options.load / "config.json").is_file():
        yield (
            f"--load {options.load}: no config.json, so no Hugging Face folder. `megatron-async convert to-hf` makes "
            "one from a checkpoint."
        )
    elif not (options.load / "tokenizer_config.json").is_file():
        yield f"--load {options.load}: no tokenizer. Give `megatron-async convert to-hf` its folder with --tokenizer."
    if options.include is not None and not options.include.is_dir():
        yield f"--include {options.include}: no such folder."
    for name, least in (("limit", 1), ("shots", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            yield f"--{name} {value}: must be at least {least}."


def _unknown(tasks: list[str], known: list[str]) -> Iterator[str]:
    for task in tasks:
        if task not in known:
            near = difflib.get_close_matches(task, known, n=3)
            yield f"--tasks {task}: lm-eval has no such task.{' Near: ' + ', '.join(near) + '.' if near else ''}"


def _evaluate(options: argparse.Namespace, manager: Any) -> dict[str, Any]:
    import lm_eval

    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(options.load), "dtype": "auto"},
        tasks=list(dict.fromkeys(options.tasks)),
        num_fewshot=options.shots,
        batch_size=int(options.batch_size) if options.batch_size.isdecimal() else options.batch_size,
        device=options.device,
        limit=options.limit,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None, "None is for the other processes of a distributed evaluation"
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "config")
    return {name: found[name] for name in kept if name in found}


def result_table(results: Mapping[str, Any]) -> Table:
    """Every number of every task, with its standard error."""
    table = Table(title="lm-eval")
    for heading in ("task", "shots", "metric", "value", "standard error"):
        table.add_column(heading, justify="right" if heading in ("shots", "value", "standard error") else "left")
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, variant = key.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{variant}")
                shown = f"{error:.4f}" if isinstance(error, float) else "-"
                table.add_row(task, str(results.get("n-shot", {}).get(task, "-")), metric, f"{value:.4f}", shown)
    return table
