# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The experiment runner of examples/paper: plans, tables and processes, on made-up losses."""

import argparse
import dataclasses
import functools
import inspect
import itertools
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megatron_async import platform

platform.activate("cpu")

from examples.paper import cluster, downstream, equal_time, execute, plan, results, slowdown  # noqa: E402
from examples.paper import run as command  # noqa: E402
from megatron_async import report  # noqa: E402
from megatron_async.config import arguments  # noqa: E402
from megatron_async.data.preprocessing.indexed import IndexedWriter  # noqa: E402
from megatron_async.files import JsonLines, json_line  # noqa: E402

TABLES = sorted(path.stem for path in (plan.FOLDER / "tables").glob("*.toml"))
TOY = plan.read_scale("toy", quick=True, pipelines=False)


def made_up(run: plan.Run) -> float:
    """Loss of a run: the delay costs 0.08, feedback leaves 0.02 of it; 0.016 is the best rate."""
    cost = {"synchronous": 0.0, "delayed": 0.08, "error-feedback": 0.02, "gradient-error-feedback": math.nan}
    return 3.0 + abs(math.log(run.rate / 0.016)) + 0.001 * run.seed**2 + cost.get(run.variant, 0.05) * run.seed


def all_runs(table: plan.Table, scale: plan.Scale) -> list[plan.Run]:
    return plan.known_runs(table, scale, made_up)


@pytest.mark.parametrize("table", [plan.read_table(name) for name in TABLES], ids=TABLES)
@pytest.mark.parametrize("pipelines", (False, True))
def test_twins_differ_in_the_delay_alone(table, pipelines):
    scale = plan.read_scale("toy", quick=False, pipelines=pipelines)
    runs = all_runs(table, scale)
    for row in table.rows:
        rate = plan.best_rate(plan.grid_runs(table, scale, row), made_up)
        plan.check_twins(plan.cells(table, scale, row, rate), table)
    assert len(runs) == len({run.key for run in runs}) == plan.count([table], scale, made_up)
    staged = pipelines and not table.oracle
    assert {run.processes for run in runs} == {2 if staged else 1}
    delays = {run.options["pipeline-schedule" if staged else "gradient-delay"] for run in runs}
    named = {str(values["gradient-delay"]) for values in table.variants.values()}
    assert delays == (
        {"1f1b" if each == "0" else "2bw" if each == "1" else each for each in named} if staged else named
    )


def test_a_plan_before_any_run_counts_the_runs_to_come():
    """Rates are not known yet; sweeps share the grid and the value that is the default."""
    for name in ("table2", "figure7", "figure8", "figure13"):
        table = plan.read_table(name, rows=["muon"])
        total = plan.count([table], TOY, made_up)
        assert plan.count([table], TOY, lambda run: None) - total in (0, 1, 2)  # factors of the rate meet the grid


def test_a_sweep_changes_one_thing_at_the_rate_of_the_optimizer():
    table = plan.read_table("figure8", rows=["muon"])
    assert [plan.row_name(row) for row in table.rows] == [f"muon-weight-decay-{x}" for x in (0.01, 0.03, 0.1, 0.3, 1.0)]
    runs = [run for run in all_runs(table, TOY) if run.variant == "delayed"]
    (base,) = [
        run
        for run in all_runs(plan.read_table("table1", rows=["muon"]), TOY)
        if run.name == "muon_delayed_lr0.016_seed1"
    ]
    assert [plan.differences(run.options, base.options) for run in runs] == [{"weight-decay"}] * 2 + [set()] + [
        {"weight-decay"}
    ] * 2


def test_batches_and_lengths_by_factors():
    table, arguments = plan.read_table("figure5"), TOY.recipe["arguments"]
    two, four = (plan.make_run(table, TOY, row, "delayed", 0.016, 1).options for row in table.rows[1:])
    for options, tokens in ((two, 2), (four, 4)):
        product = int(options["train-iters"]) * int(options["global-batch-size"])
        assert product / arguments["train-iters"] / arguments["global-batch-size"] == pytest.approx(tokens, rel=1e-3)
        assert options["eval-interval"] == options["train-iters"]
    model = plan.read_scale("2b", quick=False, pipelines=False)
    found = [plan.make_run(table, model, row, "delayed", 0.002, 1).options for row in table.rows]
    assert [(each["global-batch-size"], each["train-iters"]) for each in found] == [
        ("128", "47684"),
        ("184", "66343"),
        ("276", "88457"),
    ]
    half = plan.make_run(table, TOY, {"optimizer": "muon", "arguments": {"lr-factor": 0.5}}, "delayed", 0.016, 1)
    assert (half.rate, half.options["lr"], half.options["min-lr"]) == (0.008, "0.008", "0.0008")


def test_a_plan_with_a_fault_is_refused():
    table = plan.read_table("table1", rows=["muon"])
    runs = [run for run in all_runs(table, TOY) if run.rate == 0.016]
    other = dataclasses.replace(runs[1], words=(*runs[1].words, "--clip-grad", "0.5"))
    for wrong, message in (
        ([*runs, runs[1]], "planned twice: muon_delayed"),
        ([run for run in runs if (run.variant, run.seed) != ("synchronous", 2)], "delayed_lr0.016_seed2 has no"),
        ([*runs[:1], other, *runs[2:]], "more than the delay: clip-grad"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.check_twins(wrong, table)


def test_tables_of_two_share_their_runs():
    first, second, third = (plan.read_table(name, rows=["muon"]) for name in ("table1", "table2", "muon"))
    assert plan.count([first, second, third], TOY, made_up) == plan.count([second], TOY, made_up) == 3 - 1 + 6 * 3


@pytest.mark.parametrize("doubled", ("seeds = [1, 1]", "[[rows]]"))
def test_a_doubled_seed_or_row_is_refused(tmp_path, monkeypatch, doubled):
    text = (plan.FOLDER / "tables" / "table1.toml").read_text(encoding="utf-8")
    if doubled.startswith("seeds"):
        text = text.replace("seeds = [1, 2, 3]", doubled)
    else:
        text += '\n[[rows]]\noptimizer = "muon"\npaper = {}\n'
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "wrong.toml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(plan, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="twice" if doubled.startswith("seeds") else "one name"):
        plan.read_table("wrong")


@pytest.mark.parametrize(
    "words",
    (
        *("table99", "table1 --rows sgd", "table1 --variants wish", "table1 --scale 1b", "table1 --scale 2b --quick"),
        "figure6 --quick",  # PipeDream on more stages than layers
    ),
)
def test_wrong_usage_starts_nothing(capsys, monkeypatch, words):
    monkeypatch.setattr(execute, "run_all", None)
    assert command.main(words.split()) == 2
    assert "run.py: " in capsys.readouterr().err


@pytest.fixture(scope="module")
def accepted() -> set[tuple[str, ...]]:
    """What was parsed already: a parse takes a third of a second, and tables share most of their runs."""
    return set()


@pytest.mark.parametrize("table", TABLES)
def test_every_optimizer_and_variant_is_accepted(table, accepted, monkeypatch, tmp_path):
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))  # two thirds of a parse
    for each in all_runs(plan.read_table(table), TOY):
        options = each.options
        decisive = [options.get(name, "") for name in ("optimizer", "gradient-delay", "staleness-correction")]
        if (form := (*decisive, *sorted(options))) in accepted:
            continue
        accepted.add(form)
        layers = ["--num-layers", "16"] if table == "figure6" else []  # for PipeDream's stages
        data = ["--mock-data"]
        if "one-document-per-sequence" in options:
            with IndexedWriter(str(tmp_path / "text"), 512) as writer:
                for _ in range(1000):
                    writer.add([1, 2])
                writer.commit()
            data = ["--data-path", str(tmp_path / "text")]
        args = arguments.parse(
            [*each.words, *layers, *data, "--tokenizer-type", "NullTokenizer", "--vocab-size", "512"]
        )
        assert (args.optimizer, args.seed, args.lr) == (options["optimizer"], each.seed, each.rate)


def test_the_table_has_every_number():
    table = plan.read_table("table2", rows=["muon"], variants=["error-feedback"])
    found = {cell.variant: cell for cell in results.cells(table, TOY, made_up)}
    assert found["delayed"].gaps == pytest.approx({1: 0.08, 2: 0.16, 3: 0.24})
    assert found["error-feedback"].recovered == pytest.approx(0.75)
    assert found["error-feedback"].paper["360m"] == pytest.approx((2.583, 0.005, 0.71))
    assert all(cell.rate == 0.016 and not cell.edge for cell in found.values())
    lines = results.markdown(table, TOY, made_up).splitlines()
    assert lines[2].startswith("11 of 11 runs are done.")
    assert lines[-1].startswith(
        "| muon | error-feedback | 0.016 | 3 | 3.0447 ± 0.0240 | +0.0400 ± 0.0200 | 75% | 2.583"
    )


def test_a_table_of_some_runs_says_how_many():
    table = plan.read_table("table2", rows=["muon", "adam"], variants=["error-feedback", "gradient-error-feedback"])

    def some(run: plan.Run) -> float | None:
        if (run.row == "adam" and run.rate == 0.008) or (run.seed == 3 and run.variant == table.twin):
            return None
        return made_up(run)

    found = {cell.variant: cell for cell in results.cells(table, TOY, some)}
    assert {cell.row for cell in found.values()} == {"muon"}, "no cell before its rate is chosen"
    assert set(found["delayed"].losses) == {1, 2, 3} and set(found["delayed"].gaps) == {1, 2}
    text = results.markdown(table, TOY, some)
    assert f"of {plan.count([table], TOY, some)} runs are done" in text and "| 2 |" in text
    assert "| muon | gradient-error-feedback | 0.016 | 3 | diverged | diverged | - |" in text


def test_a_rate_at_the_edge_is_marked_and_one_that_diverges_is_not_chosen():
    scale = dataclasses.replace(TOY, grid={"default": [4e-3, 8e-3, 1.6e-2]})
    runs = plan.grid_runs(plan.read_table("table1"), scale, {"optimizer": "lion"})
    losses = dict(zip((run.rate for run in runs), (3.0, 3.1, math.nan), strict=True))
    assert plan.best_rate(runs, lambda run: losses[run.rate]) == runs[0].rate
    with pytest.raises(ValueError, match="lion: diverges at every rate"):
        plan.best_rate(runs, lambda run: math.nan)
    table = plan.read_table("table1", rows=["lion"])
    assert "| lion | delayed | 0.016* |" in results.markdown(table, scale, made_up)


def rows_of(each: plan.Run, *, skipped: int = 0) -> list[dict]:
    iterations = int(each.options["train-iters"])
    training = {"iteration": iterations, "lm_loss": 3.0, "iteration_ms": 2.0, "skipped": skipped}
    return [training] if skipped else [training, {"iteration": iterations, "valid_loss": made_up(each)}]


def fake_command(each: plan.Run, data, metrics) -> list[str]:
    """A process that writes the metrics of a run; gradient-level feedback diverges and adam crashes."""
    skipped = each.variant == "gradient-error-feedback"
    lines = [] if each.row == "adam" else JsonLines(metrics.with_name("made"), rows_of(each, skipped=skipped)) and []
    status = int(skipped or each.row == "adam")
    move = f"import os,sys; os.path.exists('made') and os.rename('made', {str(metrics)!r}); print('the end'); "
    return [sys.executable, "-c", f"import os; os.chdir({str(metrics.parent)!r}); {move} sys.exit({status})", *lines]


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(execute, "command", fake_command)
    monkeypatch.setattr(execute, "POLL_SECONDS", 0.01)


def test_runs_are_done_once_and_continued(tmp_path, fakes):
    table = plan.read_table("table2", rows=["muon"], variants=["error-feedback", "gradient-error-feedback"])
    console = Console(file=(tmp_path / "said").open("w"))

    def go() -> results.Losses:
        losses = results.Losses(tmp_path / "losses.jsonl")
        execute.run_all([table], TOY, losses, [], 4, console)
        return losses

    losses = go()
    runs = all_runs(table, TOY)
    assert len(losses.seconds()) == len(runs) == plan.count([table], TOY, losses)
    assert math.isnan(losses(next(run for run in runs if run.variant == "gradient-error-feedback")))
    assert "14 of 14 runs are done" in (tmp_path / "table2.md").read_text(encoding="utf-8")
    assert (tmp_path / "table2.png").stat().st_size > 1000
    # A killed command leaves some lines; the next one does the rest and no other.
    lines = (tmp_path / "losses.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "losses.jsonl").write_text("".join(lines[:-1]), encoding="utf-8")
    folders = sorted((tmp_path / "runs").iterdir())
    for folder in folders:
        (folder / "metrics.jsonl").unlink()
    go()
    assert sum((folder / "metrics.jsonl").exists() for folder in folders) == 1
    # A run with other options is another run.
    other = dataclasses.replace(runs[0], words=(*runs[0].words, "--clip-grad", "0.5"))
    assert losses(other) is None
    # The same run under another name is done.
    assert losses(dataclasses.replace(runs[0], row="other")) == losses(runs[0])


def test_a_run_that_fails_ends_the_others(tmp_path, fakes):
    losses = results.Losses(tmp_path / "losses.jsonl")
    with pytest.raises(execute.RunFailed, match=r"(?s)adam_synchronous.*status 1.*the end"):
        execute.run_all([plan.read_table("table1", rows=["adam"])], TOY, losses, [], 2, Console(quiet=True))
    assert not losses.path.exists()


def test_a_rate_and_seeds_on_the_command_line(monkeypatch, capsys):
    words = "table1 --quick --rows muon lion --lr 0.016 --seeds 2 --plan --output /nowhere"
    assert command.main(words.split()) == 0
    assert "8 runs, 0 done" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([*words.split(), "--seeds", "0"])


def test_a_cluster_gets_an_array_of_jobs(tmp_path, monkeypatch, capsys):
    words = ["table1", "--scale", "135m", "--rows", "muon", "--output", str(tmp_path)]
    assert command.main(words) == 2 and "TOKENIZER and DATA not set" in capsys.readouterr().err
    monkeypatch.setenv("TOKENIZER", "t")
    monkeypatch.setenv("DATA", "d")
    assert command.main(words) == 0
    jobs = [shlex.split(line) for line in (tmp_path / "jobs.txt").read_text(encoding="utf-8").splitlines()]
    assert len(jobs) == 6
    found = [plan.options(job) for job in jobs]
    assert {each["pipeline-schedule"] for each in found} == {"1f1b", "2bw"}
    assert len({each["save"] for each in found}) == 6 and all(each["load"] == each["save"] for each in found)
    script = tmp_path / "array.sbatch"
    assert "--array=1-6" in script.read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    # What a job has written is collected; the next array has the rest.
    scale, table = plan.read_scale("135m", quick=False, pipelines=False), plan.read_table("table1", rows=["muon"])
    first = plan.known_runs(table, scale, made_up)[0]
    JsonLines(tmp_path / "runs" / first.name / "metrics.jsonl", rows_of(first)).close()
    losses = results.Losses(tmp_path / "losses.jsonl")
    assert cluster.write([table], scale, losses, tmp_path).startswith("5 jobs")
    assert losses(first) == made_up(first)


def done(table: plan.Table, scale: plan.Scale, folder, key: str = "lm_loss") -> results.Losses:
    """The runs of a table with their files, each of two batches."""
    losses = results.Losses(folder / "losses.jsonl")
    for each in all_runs(table, scale):
        rows = [{"iteration": batch, "lm_loss": 3.0 + batch, key: 0.5 + batch, "skipped": 0} for batch in (1, 2)]
        JsonLines(folder / "runs" / each.name / "metrics.jsonl", [*rows, rows_of(each)[-1]]).close()
        losses.add(each, report.read_metrics(folder / "runs" / each.name / "metrics.jsonl"), 1.0)
    return losses


def test_curves_are_those_of_the_files(tmp_path):
    table = plan.read_table("figure17")
    losses = done(table, TOY, tmp_path, "stale_update_cosine")
    panels = results.curves(table, TOY, losses).axes
    assert [axes.get_title() for axes in panels] == ["muon", "adam"]
    assert [line.get_label() for line in panels[1].lines] == ["synchronous", "delayed", "sync-start"]
    assert panels[0].lines[1].get_xydata().tolist() == [[1, 1.5], [2, 2.5]]
    results.write(table, TOY, losses)
    assert (tmp_path / "figure17.png").stat().st_size > 1000


def test_trained_models_are_evaluated_once(tmp_path, monkeypatch, capsys):
    scale, table = plan.read_scale("10b", quick=False, pipelines=False), plan.read_table("table4")
    done(table, scale, tmp_path)
    said = []

    def fake(words):
        said.append(words[0])
        target = next(word for flag, word in itertools.pairwise(words) if flag in ("--save", "--output"))
        if words[0] == "convert":
            assert words[words.index("--tokenizer") + 1] == "t"
            (Path(target) / "config.json").parent.mkdir()
            (Path(target) / "config.json").write_text("{}")
        else:
            values = {task: {"acc,none": 0.25, "acc_norm,none": 0.5} for task in table.tasks}
            values["mmlu"] = {"acc,none": 0.125}
            Path(target).write_text(json.dumps({"results": values}))

    monkeypatch.setattr(downstream, "command", fake)
    words = ["table4", "--scale", "10b", "--output", str(tmp_path)]
    monkeypatch.delenv("TOKENIZER", raising=False)
    assert command.main(words) == 2 and "TOKENIZER not set" in capsys.readouterr().err
    monkeypatch.setenv("TOKENIZER", "t")
    assert command.main(words) == 0 and command.main(words) == 0
    assert said == ["convert", "evaluate"] * 3
    lines = (tmp_path / "table4.md").read_text(encoding="utf-8").splitlines()
    ours = "0.500 | 0.500 | 0.500 | 0.500 | 0.125 | 0.500 | 0.500 | 0.500 |"
    assert lines[-2].startswith("| error-feedback | ours | ") and lines[-2].endswith(ours)
    assert lines[-1].startswith("| error-feedback | paper | 1.906 | 0.415 | 0.637 |")


def test_the_slowdown_is_the_papers_and_that_of_our_tables():
    printed = {  # table 12, M = 16, 32, 64
        ("1f1b", 2.0): (1.938, 1.469, 1.234),
        ("zb1p", 2.0): (1.313, 1.156, 1.078),
        ("dualpipe", 2.0): (1.292, 1.146, 1.073),
        ("zb1p", 3.0): (1.469, 1.234, 1.117),
        ("dualpipe", 3.0): (1.438, 1.219, 1.109),
    }
    for (schedule, backward), values in printed.items():
        found = [slowdown.modelled(schedule, count, backward) for count in slowdown.MICROBATCHES]
        assert found == pytest.approx(values, abs=6e-4)
    for schedule in ("1f1b", "2bw"):
        assert slowdown.simulated(schedule, 16, 2.0) == pytest.approx(slowdown.modelled(schedule, 16, 2.0), rel=1e-9)


def test_an_unfinished_run_is_not_complete():
    first = plan.known_runs(plan.read_table("table1"), TOY, made_up)[0]
    half = report.parse_metrics('{"iteration": 5, "lm_loss": 3.0, "skipped": 0}\n{"iteration": 5, "valid_loss": 3.0}\n')
    assert not results.is_complete(first, half)


def test_a_skipped_update_of_a_run_that_goes_on_is_not_its_end(tmp_path):
    """A cluster's runs are collected while they run; ten skipped updates in a row end one."""
    table, scale = plan.read_table("table1"), TOY
    first = plan.known_runs(table, scale, made_up)[0]
    losses = results.Losses(tmp_path / "losses.jsonl")
    file = tmp_path / "runs" / first.name / "metrics.jsonl"
    file.parent.mkdir(parents=True)
    rows = [{"iteration": step, "lm_loss": 3.0, "iteration_ms": 2.0, "skipped": int(step > 5)} for step in range(1, 16)]
    for last, collected in ((6, False), (14, False), (15, True)):
        file.write_text("".join(map(json_line, rows[:last])))
        cluster.collect([table], scale, losses)
        assert (losses(first) is not None) == collected


def test_equal_time_gives_each_schedule_the_batches_that_fit(tmp_path, fakes, monkeypatch):
    """1F1B at 3 ms a batch, zero bubble at 0.8 of it, the others at 2; measured once, trained once."""
    measured = []

    def complete(runs, data, output, jobs=1):
        for each in runs:
            measured.append((each.variant, each.seed, int(each.options["train-iters"])))
            time = {"iteration_ms": 3.0 if each.variant == "synchronous" else 2.0}
            rows = [row | time if "lm_loss" in row else row for row in rows_of(each)]
            yield each, report.Metrics({}, tuple(rows[:1]), tuple(rows[1:]))

    class Corpus:
        def megatron_arguments(self):
            return []

    monkeypatch.setattr(execute, "complete", complete)
    monkeypatch.setattr(equal_time, "prepare_corpus", lambda folder, vocab_size: Corpus())
    monkeypatch.setattr(equal_time, "measure_zero_bubble", lambda scale: 0.8)
    words = ["--quick", "--rows", "muon", "--lr", "0.016", "--seeds", "2", "--output", str(tmp_path)]
    assert equal_time.main(words) == 0
    turns = equal_time.TURNS * 5
    assert {batches for _, _, batches in measured[:turns]} == {equal_time.TIMED_BATCHES}
    counts = dict.fromkeys(("delayed", "error-feedback", "weight-prediction", "wpipe"), 1088)
    counts |= {"synchronous": 724, "zero-bubble": 904}
    expected = {(name, seed, batches) for name, batches in counts.items() for seed in (1, 2)}
    assert set(measured[turns:]) == expected
    text = (tmp_path / "equal_time.md").read_text(encoding="utf-8")
    assert "| muon | error-feedback | 2.0 | 1088 | 2 | 3.0325 ± 0.0163 | +0.0300 ± 0.0141 |" in text
    assert (tmp_path / "equal_time.png").stat().st_size > 1000
    assert equal_time.main(words) == 0 and len(measured) == turns + len(expected)


def test_runs_side_by_side_end_together(tmp_path, fakes):
    """Two at a time, in any order; when one fails, the others are ended."""
    runs = all_runs(plan.read_table("table2", rows=["muon"], variants=["error-feedback"]), TOY)
    ended = [each.name for each, _ in execute.complete(runs, [], tmp_path, jobs=2)]
    assert sorted(ended) == sorted(each.name for each in runs)
    crashing = plan.grid_runs(plan.read_table("table2"), TOY, plan.read_table("table2", rows=["adam"]).rows[0])
    with pytest.raises(execute.RunFailed):
        list(execute.complete([crashing[0], *runs], [], tmp_path, jobs=2))


def test_equal_time_takes_the_rate_that_run_py_chose(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(equal_time, "ROOT", tmp_path)
    table = plan.read_table("equal_time", rows=["muon"])
    assert equal_time.main(["--quick", "--rows", "muon"]) == 2
    assert "no learning rate for muon" in capsys.readouterr().err
    losses = results.Losses(tmp_path / "runs" / "paper" / TOY.name / "losses.jsonl")
    for each in plan.grid_runs(table, TOY, table.rows[0]):
        rows = rows_of(each)
        losses.add(each, report.Metrics({}, tuple(rows[:1]), tuple(rows[1:])), 1.0)
    assert equal_time._rates(table, argparse.Namespace(quick=True, lr=None)) == {"muon": 0.016}
