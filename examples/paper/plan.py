# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The runs behind a table of the paper, from the files in tables/ and scales/.

A row's runs are a grid of learning rates on the synchronous twin with the first seed, then every variant and seed at
the rate whose loss was the lowest. A row with a sweep becomes one row for each of its values; these have the rate of
the optimizer without the value, like the paper's one-dimensional sweeps (A.1). Runs with the same options are one run,
whatever their tables call them.
"""

import itertools
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples import pretrain

FOLDER = Path(__file__).resolve().parent
RECIPE_TABLES = ("cluster", "arguments", "pipeline", "gradient-delay", "schedule", "optimizer")
SCHEDULES = {0: "1f1b", 1: "2bw"}
"""Pipeline schedules by their delay; other delays are named like their schedule."""
DELAY_OPTIONS = {
    *("gradient-delay", "pipeline-schedule", "staleness-correction", "correction-strength"),
    *("sync-start-iters", "sync-cooldown-iters"),
}
"""The options that a run and its synchronous twin may differ in."""
SHARES = ("sync-start", "sync-cooldown", "lr-wsd-decay")
"""`NAME-share` in a table is `--NAME-iters`, in parts of the batches of the run."""

RATE_TO_COME = 1e6
"""Stands for the rate of a grid that is not done, so that its runs can be counted."""

Options = Mapping[str, Any]
Key = frozenset[tuple[str, str]]
"""What is run: options and their values."""
Loss = Callable[["Run"], float | None]
"""Validation loss of a run: None as long as it is not done, NaN if it diverged."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        row, variant: name of the row and of the variant.
        rate: peak learning rate.
        seed: of weights and data order.
        words: command line of `megatron_async.pretrain`, without files.
    """

    row: str
    variant: str
    rate: float
    seed: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """Unique among runs of a scale."""
        return f"{self.row}_{self.variant}_lr{self.rate:g}_seed{self.seed}"

    @property
    def options(self) -> dict[str, str]:
        return options(self.words)

    @property
    def key(self) -> Key:
        return key(self.words)

    @property
    def processes(self) -> int:
        return int(self.options.get("pipeline-model-parallel-size", 1))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the paper.

    Attributes:
        name, title: of its file, and its heading.
        seeds: the first one also serves the grid.
        variants: options of each; the first is the synchronous twin, the second the delay that nothing corrects.
        rows: `optimizer`, optionally `name`, `variants` and `arguments`, and `paper`: losses by scale and variant.
            `tuned` false: the rate of the optimizer's row without arguments.
        oracle: the runs are possible in one process only, whatever the scale.
        scales: the only scales that it is for; empty for all.
        differ: options that a run and its twin may differ in beside the delay.
        curve: key of the metrics file that the picture draws over the batches; empty for bars of the gaps.
        tasks: lm-eval's tasks for the trained models.
    """

    name: str
    title: str
    seeds: tuple[int, ...]
    variants: Mapping[str, Options]
    rows: tuple[Options, ...]
    oracle: bool = False
    scales: tuple[str, ...] = ()
    differ: frozenset[str] = frozenset()
    curve: str = ""
    tasks: tuple[str, ...] = ()

    @property
    def twin(self) -> str:
        return next(iter(self.variants))

    @property
    def plain(self) -> str:
        return tuple(self.variants)[1]


@dataclass(frozen=True, slots=True)
class Scale:
    """A model with its data and learning rates.

    Attributes:
        name: of the file, with `-quick` for its shorter form.
        recipe: as in examples/recipes.
        grid: peak learning rates by optimizer, `default` for the others. Empty: the recipe's.
        seconds: of one run, estimated; 0 if unknown.
        pipelines: run delays as pipelines, not in one process.
    """

    name: str
    recipe: Mapping[str, Any]
    grid: Mapping[str, Sequence[float]]
    seconds: float
    pipelines: bool


def options(words: Sequence[str]) -> dict[str, str]:
    """Options of a command line without their dashes; a later one wins, a switch is "true"."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:]] = "true" if following.startswith("--") else following
    return found


def key(words: Sequence[str]) -> Key:
    return frozenset(options(words).items())


def read_table(name: str, *, rows: Sequence[str] = (), variants: Sequence[str] = ()) -> Table:
    """A table, with `rows` and `variants` only if given, in that order of rows.

    Raises:
        ValueError: unknown name, row or variant, or a doubled seed or row.
    """
    path = FOLDER / "tables" / f"{name}.toml"
    if not path.is_file():
        raise ValueError(f"{name}: no such table. Known: {', '.join(_stems('tables'))}.")
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    known: dict[str, Options] = {row_name(row): row for row in content["rows"]}
    problems = [f"--rows {row}: {name} has {', '.join(known)}." for row in rows if row not in known]
    chosen = content["variants"]
    problems += [f"--variants {each}: {name} has {', '.join(chosen)}." for each in variants if each not in chosen]
    if len(known) < len(content["rows"]):
        problems.append(f"{path}: two rows have one name.")
    if len(set(content["seeds"])) < len(content["seeds"]):
        problems.append(f"{path}: seeds {content['seeds']} has a seed twice.")
    if problems:
        raise ValueError("\n".join(problems))
    kept = [each for each in chosen if not variants or each in variants or each in list(chosen)[:2]]
    return Table(
        name,
        content["title"],
        tuple(content["seeds"]),
        {each: chosen[each] for each in kept},
        tuple(itertools.chain.from_iterable(_swept(known[row]) for row in rows or known)),
        content.get("oracle", False),
        tuple(content.get("scales", ())),
        frozenset(content.get("differ", ())),
        content.get("curve", ""),
        tuple(content.get("tasks", ())),
    )


def _swept(row: Options) -> Iterator[Options]:
    """A row for each combination of the values of its sweep; the row itself if it has none."""
    if "sweep" not in row:
        yield row
        return
    rest = {name: value for name, value in row.items() if name != "sweep"}
    for values in itertools.product(*row["sweep"].values()):
        chosen = dict(zip(row["sweep"], values, strict=True))
        name = "-".join([row_name(row), *(f"{option}-{value}" for option, value in chosen.items())])
        yield {**rest, "name": name, "tuned": False, "arguments": row.get("arguments", {}) | chosen}


def read_scale(name: str, *, quick: bool, pipelines: bool) -> Scale:
    """A scale: a file in scales/, a recipe of examples/recipes whose name ends in it, or the path of a recipe.

    Raises:
        ValueError: unknown name, or `quick` for a scale that has no shorter form.
    """
    path = FOLDER / "scales" / f"{name}.toml"
    if not path.is_file():
        return Scale(Path(name).stem, pretrain.read(_recipe(name, quick)), {}, 0.0, pipelines=True)
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    recipe = {table: values for table, values in content.items() if table in RECIPE_TABLES}
    if quick:
        recipe["arguments"] = recipe["arguments"] | content["quick"]
    seconds = content["cost"]["quick" if quick else "seconds"]
    return Scale(f"{name}-quick" if quick else name, recipe, content["grid"], seconds, pipelines)


def _recipe(name: str, quick: bool) -> str:
    found = (
        [name]
        if name.endswith(".toml")
        else [file.stem for file in pretrain.RECIPES.glob("*.toml") if name in file.stem.split("-")]
    )
    if len(found) != 1:
        known = [*_stems("scales"), *(file.stem for file in sorted(pretrain.RECIPES.glob("*.toml")))]
        raise ValueError(f"--scale {name}: no such scale, or several. Known: {', '.join(known)}.")
    if quick:
        raise ValueError(f"--quick: {name} has no shorter form. Use --scale toy.")
    return found[0]


def _stems(folder: str) -> list[str]:
    return sorted(file.stem for file in (FOLDER / folder).glob("*.toml"))


def row_name(row: Options) -> str:
    return str(row.get("name", row["optimizer"]))


def variants_of(table: Table, row: Options) -> list[str]:
    """Variants that a row has: those that it names, or those for which the paper has a loss, and the first two."""
    named = set(row.get("variants", [each for losses in row["paper"].values() for each in losses]))
    return [each for each in table.variants if each in named | {table.twin, table.plain}]


def grid(scale: Scale, row: Options) -> list[float]:
    """Peak learning rates of a row."""
    if scale.grid:
        return list(scale.grid.get(row["optimizer"], scale.grid["default"]))
    own = scale.recipe.get("optimizer", {}).get(row["optimizer"], {})
    return [float(own.get("lr", scale.recipe["arguments"]["lr"]))]


def make_run(table: Table, scale: Scale, row: Options, variant: str, rate: float, seed: int) -> Run:
    """The run of one cell and seed."""
    values = {"optimizer": row["optimizer"], "lr": rate, "seed": seed, **row.get("arguments", {})}
    values |= table.variants[variant]
    values["lr"] = rate = rate * values.pop("lr-factor", 1)
    values |= _sizes(scale.recipe["arguments"], values.pop("batch-factor", 1), values.pop("token-factor", 1))
    batches = values.get("train-iters", scale.recipe["arguments"]["train-iters"])
    for name in SHARES:
        if (share := values.pop(f"{name}-share", None)) is not None:
            values[f"{name}-iters"] = round(share * batches)
    if scale.pipelines and not table.oracle:
        delay = values.pop("gradient-delay")
        values["pipeline-schedule"] = SCHEDULES.get(delay, delay)
    words = pretrain.resolve(scale.recipe, "sync", list(pretrain.words(values)))
    return Run(row_name(row), variant, rate, seed, tuple(words))


def _sizes(recipe: Options, batch: float, tokens: float) -> dict[str, int]:
    """The options that give a run other batches or another number of tokens, by factors of the recipe's."""
    if batch == tokens == 1:
        return {}
    size, micro = round(recipe["global-batch-size"] * batch), recipe["micro-batch-size"] * batch
    batches = round(recipe["train-iters"] * tokens / batch)
    return {
        "global-batch-size": size,
        "micro-batch-size": int(micro) if micro == int(micro) else math.gcd(recipe["micro-batch-size"], size),
        "train-iters": batches,
        "eval-interval": batches,
    }


def grid_runs(table: Table, scale: Scale, row: Options) -> list[Run]:
    """The runs that choose a row's learning rate."""
    base = _tuned(row)
    return [make_run(table, scale, base, table.twin, rate, table.seeds[0]) for rate in grid(scale, base)]


def _tuned(row: Options) -> Options:
    """The row whose learning rate a row has."""
    return row if row.get("tuned", True) else {"optimizer": row["optimizer"]}


def best_rate(runs: Sequence[Run], loss: Loss) -> float | None:
    """The rate of the lowest loss, or None as long as one of the runs is not done.

    Raises:
        ValueError: every run diverged.
    """
    if len(runs) == 1:
        return runs[0].rate
    losses = {run.rate: found for run in runs if (found := loss(run)) is not None}
    if len(losses) < len(runs):
        return None
    finite = {rate: found for rate, found in losses.items() if found == found}
    if not finite:
        raise ValueError(f"{runs[0].row}: diverges at every rate of its grid {sorted(losses)}. Give smaller rates.")
    return min(finite, key=lambda rate: finite[rate])


def cells(table: Table, scale: Scale, row: Options, rate: float) -> list[Run]:
    """Every variant and seed of a row at one rate, seed by seed."""
    return [
        make_run(table, scale, row, variant, rate, seed) for seed in table.seeds for variant in variants_of(table, row)
    ]


def known_runs(table: Table, scale: Scale, loss: Loss) -> list[Run]:
    """Runs that can be named now, seed by seed; a row's cells follow when its rate is known."""
    runs: dict[Key, Run] = {}
    for row in table.rows:
        first = grid_runs(table, scale, row)
        rate = best_rate(first, loss)
        for run in [*first, *(cells(table, scale, row, rate) if rate else [])]:
            runs.setdefault(run.key, run)
    return sorted(runs.values(), key=lambda run: table.seeds.index(run.seed))


def count(tables: Sequence[Table], scale: Scale, loss: Loss) -> int:
    """Number of different runs behind tables, those of rates that are not known yet included."""
    found: set[Key] = set()
    for table in tables:
        for row in table.rows:
            first = grid_runs(table, scale, row)
            found |= {run.key for run in first}
            if (rate := best_rate(first, loss)) is not None:
                found |= {run.key for run in cells(table, scale, row, rate)}
                continue
            chosen = make_run(table, scale, _tuned(row), table.twin, RATE_TO_COME, table.seeds[0])
            found |= {run.key for run in cells(table, scale, row, RATE_TO_COME)} - {chosen.key}
    return len(found)


def differences(one: Options, other: Options) -> set[str]:
    """Names of the options in which two runs differ."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def check_twins(runs: Sequence[Run], table: Table) -> None:
    """Every run has one twin of its row, rate and seed that differs in nothing but the delay.

    Raises:
        ValueError: names the first run without one and the options that differ.
    """
    if repeated := {run.name for run in runs if sum(run.name == other.name for other in runs) > 1}:
        raise ValueError(f"planned twice: {', '.join(sorted(repeated))}")
    twins = {(run.row, run.rate, run.seed): run for run in runs if run.variant == table.twin}
    for run in runs:
        other = twins.get((run.row, run.rate, run.seed))
        if other is None:
            raise ValueError(f"{run.name} has no {table.twin} twin of the same rate and seed")
        if wrong := differences(run.options, other.options) - DELAY_OPTIONS - table.differ:
            raise ValueError(f"{run.name} and its twin differ in more than the delay: {', '.join(sorted(wrong))}")


def objections(table: Table, scale: Scale) -> Iterator[str]:
    """Why a table cannot be run at a scale."""
    name = scale.name.removesuffix("-quick")
    if table.scales and name not in table.scales:
        yield f"{table.name} is for --scale {' or '.join(table.scales)}, not {scale.name}."
    layers = scale.recipe["arguments"].get("num-layers", math.inf)
    for variant, values in table.variants.items():
        schedule, _, stages = str(values["gradient-delay"]).partition(":")
        if schedule == "pipedream" and int(stages) > layers:
            yield f"{table.name}: {variant} needs {stages} layers, {scale.name} has {layers}. Choose --variants."
