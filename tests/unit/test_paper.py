# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The experiment runner of examples/paper: plans, tables and processes, on made-up losses."""

import dataclasses
import functools
import inspect
import math
import shlex
import subprocess
import sys

import pytest
from rich.console import Console

from megatron_async import platform

platform.activate("cpu")

from examples.paper import cluster, equal_time, execute, plan, results  # noqa: E402
from examples.paper import run as command  # noqa: E402
from megatron_async import report  # noqa: E402
from megatron_async.config import arguments  # noqa: E402
from megatron_async.files import JsonLines  # noqa: E402

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
    runs = all_runs(table, scale := plan.read_scale("toy", quick=False, pipelines=pipelines))
    plan.check_twins(runs, table.twin)
    assert len(runs) == plan.count([table], scale)
    delayed = [run for run in runs if run.variant != table.twin and "wpipe" not in run.variant]
    staged = pipelines and table.name != "table8"
    assert {run.processes for run in runs} == {2 if staged else 1}
    key = "pipeline-schedule" if staged else "gradient-delay"
    assert {run.options[key] for run in delayed} == {"2bw" if staged else "1"}


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
            plan.check_twins(wrong, table.twin)


def test_tables_of_two_share_their_runs():
    first, second, third = (plan.read_table(name, rows=["muon"]) for name in ("table1", "table2", "muon"))
    assert plan.count([first, second, third], TOY) == plan.count([second], TOY) == 3 - 1 + 5 * 3


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
    ("table99", "table1 --rows sgd", "table1 --variants wish", "table1 --scale 1b", "table1 --scale 2b --quick"),
)
def test_wrong_usage_starts_nothing(capsys, monkeypatch, words):
    monkeypatch.setattr(execute, "run_all", None)
    assert command.main(words.split()) == 2
    assert "run.py: " in capsys.readouterr().err


@pytest.mark.parametrize("table", TABLES)
def test_every_optimizer_and_variant_is_accepted(table, monkeypatch):
    monkeypatch.setattr(inspect, "getsource", functools.cache(inspect.getsource))  # two thirds of a parse
    runs = all_runs(plan.read_table(table), TOY)
    chosen = {run.variant: run for run in runs} | {run.row: run for run in runs}
    for each in {run.name: run for run in chosen.values()}.values():
        args = arguments.parse([*each.words, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "512"])
        assert (args.optimizer, args.seed, args.lr) == (each.options["optimizer"], each.seed, each.rate)


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
    assert f"of {plan.count([table], TOY)} runs are done" in text and "| 2 |" in text
    assert "| muon | gradient-error-feedback | 0.016 | 3 | diverged | diverged | - |" in text


def test_a_rate_at_the_edge_is_marked_and_one_that_diverges_is_not_chosen():
    runs = plan.grid_runs(plan.read_table("table1"), TOY, {"optimizer": "lion"})
    losses = dict(zip((run.rate for run in runs), (3.0, 3.1, 3.2, math.nan), strict=True))
    assert plan.best_rate(runs, lambda run: losses[run.rate]) == runs[0].rate
    with pytest.raises(ValueError, match="lion: diverges at every rate"):
        plan.best_rate(runs, lambda run: math.nan)
    table = plan.read_table("table1", rows=["lion"])
    assert "| lion | delayed | 0.004* |" in results.markdown(table, TOY, made_up)


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
    assert len(losses.seconds()) == len(runs) == plan.count([table], TOY)
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


def test_an_unfinished_run_is_not_complete():
    first = plan.known_runs(plan.read_table("table1"), TOY, made_up)[0]
    half = report.parse_metrics('{"iteration": 5, "lm_loss": 3.0, "skipped": 0}\n{"iteration": 5, "valid_loss": 3.0}\n')
    assert not results.is_complete(first, half)


def test_equal_time_gives_each_schedule_the_batches_that_fit(tmp_path, fakes, monkeypatch):
    """1F1B at 3 ms a batch, the others at 2: 1.5 times the batches; measured once, trained once."""
    times = {"synchronous": 3.0, "delayed": 2.0, "error-feedback": 2.0}
    measured = []

    def complete(each: plan.Run, data, output):
        measured.append((each.variant, each.seed, int(each.options["train-iters"])))
        rows = [row | {"iteration_ms": times[each.variant]} if "lm_loss" in row else row for row in rows_of(each)]
        return report.Metrics({}, tuple(rows[:1]), tuple(rows[1:]))

    class Corpus:
        def megatron_arguments(self):
            return []

    monkeypatch.setattr(execute, "complete", complete)
    monkeypatch.setattr(equal_time, "prepare_corpus", lambda folder, vocab_size: Corpus())
    words = ["--quick", "--lr", "0.016", "--seeds", "2", "--output", str(tmp_path)]
    assert equal_time.main(words) == 0
    timed, trained = measured[:9], measured[9:]
    assert {batches for _, _, batches in timed} == {equal_time.TIMED_BATCHES}
    assert set(trained) == {(name, seed, 724 if ms == 3 else 1086) for name, ms in times.items() for seed in (1, 2)}
    text = (tmp_path / "equal_time.md").read_text(encoding="utf-8")
    assert "| error-feedback | 2.0 | 1086 | 2 | 3.0325 ± 0.0163 |" in text
    assert equal_time.main(words) == 0 and len(measured) == 15
