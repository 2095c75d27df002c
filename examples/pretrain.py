#!/usr/bin/env python3
# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Start a run of a recipe:

    MODE=async TOKENIZER=... DATA=... SAVE=... python examples/pretrain.py RECIPE [more arguments]

RECIPE is a name in examples/recipes or the path of a TOML file. More arguments go to megatron_async.pretrain and
override the recipe. examples/README.md explains recipes.

Environment variables:
    MODE       sync: Megatron-Core's 1F1B; async (default): 2BW with error feedback. All else is the same.
    TOKENIZER  Hugging Face tokenizer folder.
    DATA       data prefix of megatron-async preprocess.
    SAVE       folder for checkpoints and metrics. The same command again continues from its newest checkpoint.
    GPUS       processes on this node. Default: the recipe's.
    NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun. Default: the recipe's nodes, 0, localhost, 29400.
    LAUNCH     replaces the torchrun command: LAUNCH=echo prints the arguments, examples/slurm uses a job script.

--dry-run prints parameters, memory, schedule and time for GPUS x NNODES devices. It needs none of the variables.
"""

import argparse
import functools
import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parent / "recipes"
MODES = {
    "sync": {"pipeline-schedule": "1f1b"},
    "async": {"pipeline-schedule": "2bw", "staleness-correction": "error-feedback", "correction-strength": 1.0},
}
# The number of stages and how the layers are split over them: one of them on top replaces all of a recipe's.
LAYOUT = (
    "pipeline-model-parallel-size",
    "pipeline-model-parallel-layout",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
)
REQUIRED = {
    "TOKENIZER": "a Hugging Face tokenizer folder",
    "DATA": "a data prefix, without .bin",
    "SAVE": "a folder for checkpoints",
}
ENTRY = ["-m", "megatron_async.pretrain"]


def read(name: str) -> dict[str, Any]:
    """The tables of a recipe.

    Raises:
        ValueError: unknown name, or unknown tables in the file.
    """
    path = RECIPES / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RECIPES.glob("*.toml")))
        raise ValueError(f"RECIPE {name}: no such recipe or file. Known: {known}.")
    recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    known_tables = {"cluster", "arguments", "pipeline", "gradient-delay", "schedule", "optimizer"}
    if unknown := recipe.keys() - known_tables:
        raise ValueError(f"{path}: unknown {sorted(unknown)}. A recipe has {sorted(known_tables)}.")
    return recipe


def resolve(recipe: Mapping[str, Any], mode: str, more: Sequence[str]) -> list[str]:
    """The command line of a run: the tables of `recipe` that apply, then the schedule of `mode`, then `more`."""
    values, schedule, given = dict(recipe["arguments"]), dict(MODES[mode]), decisive(more)
    if "gradient-delay" in given:
        values |= recipe.get("gradient-delay", {})
        del schedule["pipeline-schedule"]
    else:
        name = given.get("pipeline-schedule", schedule["pipeline-schedule"])
        values |= recipe.get("pipeline", {}) | recipe.get("schedule", {}).get(name, {})
        if name == "1f1b":  # has no delay to correct
            schedule = MODES["sync"]
        if given.keys() & LAYOUT:
            values = {option: value for option, value in values.items() if option not in LAYOUT}
    values |= recipe.get("optimizer", {}).get(given.get("optimizer", values["optimizer"]), {})
    if (share := values.pop("min-lr-share", None)) is not None:
        values["min-lr"] = f"{share * float(given.get('lr', values['lr'])):g}"
    return [*words(values), *words(schedule), *more]


def decisive(more: Sequence[str]) -> dict[str, str]:
    """The options among `more` that decide which parts of a recipe apply."""
    return vars(_parser().parse_known_args(more)[0])


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, argument_default=argparse.SUPPRESS)
    for option in ("gradient-delay", "pipeline-schedule", "optimizer", "lr", *LAYOUT):
        parser.add_argument(f"--{option}", dest=option)
    return parser


def words(values: Mapping[str, Any]) -> Iterator[str]:
    """Options as words. True is a switch; False leaves the option out."""
    for name, value in values.items():
        if value is not False:
            yield f"--{name}"
            if value is not True:
                yield str(value)


def files(environment: Mapping[str, str]) -> dict[str, Any]:
    """Options that name the files of a run, where their variables are set."""
    save = environment.get("SAVE")
    return {
        "tokenizer-model": environment.get("TOKENIZER", False),
        "data-path": environment.get("DATA", False),
        "save": save or False,
        "load": save or False,
        "metrics-file": f"{save}/metrics.jsonl" if save else False,
    }


def torchrun(environment: Mapping[str, str], nodes: str, gpus: str) -> list[str]:
    """The command that starts this node's processes."""
    endpoint = f"{environment.get('MASTER_ADDR', 'localhost')}:{environment.get('MASTER_PORT', '29400')}"
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", gpus),
        *("--node-rank", environment.get("NODE_RANK", "0"), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
        *ENTRY,
    ]


def main(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Replace this process by the run; 2 for wrong usage."""
    if not argv or argv[0].startswith("-"):
        asked = list(argv) in (["-h"], ["--help"])
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    name, *more = argv
    dry_run = "--dry-run" in more
    mode = environment.get("MODE", "async")
    problems = [f"MODE={mode}: must be {' or '.join(MODES)}"] if mode not in MODES else []
    problems += [f"{key} is not set: {text}" for key, text in REQUIRED.items() if not environment.get(key, dry_run)]
    try:
        recipe = read(name)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    cluster = {"nodes": 1, "gpus": 8} | recipe.get("cluster", {})
    nodes = environment.get("NNODES", str(cluster["nodes"]))
    gpus = environment.get("GPUS", str(cluster["gpus"]))
    if launch := environment.get("LAUNCH"):
        command = shlex.split(launch)
    elif dry_run:
        command = [sys.executable, *ENTRY]
        environment = {**environment, "WORLD_SIZE": str(int(nodes) * int(gpus))}
    else:
        command = torchrun(environment, nodes, gpus)
    arguments = resolve({**recipe, "arguments": recipe["arguments"] | files(environment)}, mode, more)
    os.execvpe(command[0], [*command, *arguments], dict(environment))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
