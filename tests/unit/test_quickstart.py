# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Reports from metrics files and traces, and the quick start's driver, on made-up runs."""

import io
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console

from benchmarks import whole
from megatron_async import report
from megatron_async.cli import quickstart
from tools import plot_runs

ROOT = Path(__file__).resolve().parents[2]


def metrics_lines(iterations: int, *, milliseconds: float = 100.0, offset: float = 0.0, every: int = 5) -> list[str]:
    """A metrics file: slow first ten batches, falling loss, an evaluation `every` few batches."""
    rows: list[dict[str, object]] = [{"config": {"lr": 1e-3}}]
    for iteration in range(1, iterations + 1):
        loss = 8.0 / math.sqrt(iteration) + offset
        slow = 10.0 if iteration <= 10 else 1.0
        rows.append({"iteration": iteration, "lm_loss": loss, "iteration_ms": milliseconds * slow})
        if iteration % every == 0:
            rows.append({"iteration": iteration, "valid_loss": loss + 0.1})
    return [json.dumps(row) for row in rows]


def made_up_run(iterations: int = 40, **options: float) -> report.Metrics:
    return report.parse_metrics("\n".join(metrics_lines(iterations, **options)) + "\n")  # type: ignore[arg-type]


def trace_events(batches: int, *, bubble: float = 0.0) -> list[dict[str, object]]:
    """Two stages, two micro-batches: F 10 ms, B 20 ms each, U 2 ms, then `bubble` ms of nothing."""
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "x"}}]
    for stage in range(2):
        clock = 10.0 * stage
        for batch in range(batches):
            boxes = [("F", 10.0), ("B", 20.0)] * 2 + [("U", 2.0)]
            for index, (kind, length) in enumerate(boxes):
                arguments = {"kind": kind, "batch": batch, "version": batch}
                if kind != "U":
                    arguments["microbatch"] = 2 * batch + index // 2
                times = {"ts": clock * 1000, "dur": length * 1000}
                events.append({"name": kind, "ph": "X", "pid": 0, "tid": stage, "args": arguments, **times})
                clock += length
            clock += bubble
    return events


def write_trace(path: Path, batches: int, *, bubble: float = 0.0) -> Path:
    path.write_text(json.dumps({"traceEvents": trace_events(batches, bubble=bubble)}), encoding="utf-8")
    return path


# metrics


def test_read_metrics_sorts_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(metrics_lines(10)) + "\n", encoding="utf-8")
    metrics = report.read_metrics(path)
    assert metrics.config == {"lr": 1e-3}
    assert [row["iteration"] for row in metrics.training] == list(range(1, 11))
    assert metrics.validation_losses() == {row["iteration"]: row["valid_loss"] for row in metrics.validation}
    assert list(metrics.validation_losses()) == [5, 10]


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_half_written_last_line_is_left_out(cut: int) -> None:
    lines = metrics_lines(7, every=100)
    text = "\n".join(lines)
    metrics = report.parse_metrics(text[:-cut])
    assert [row["iteration"] for row in metrics.training] == list(range(1, 7))


def test_an_empty_file_is_a_run_that_has_not_begun() -> None:
    assert report.parse_metrics("") == report.Metrics({}, (), ())


@pytest.mark.parametrize("broken", ['{"iteration": 3, "lm_l', '{"iteration": 3}', "[1]", "null"])
def test_a_broken_line_is_named(broken: str) -> None:
    lines = metrics_lines(2)
    lines.insert(2, broken)
    with pytest.raises(ValueError, match="file, line 3: "):
        report.parse_metrics("\n".join(lines) + "\n", "file")


def test_median_leaves_the_warm_up_out() -> None:
    assert report.median_ms(made_up_run(40, milliseconds=50.0)) == 50.0
    # Shorter than twice the warm-up: half of the run counts, here with its slow batches.
    assert report.median_ms(made_up_run(6, milliseconds=50.0)) == 500.0


def test_summary_has_the_documented_shape() -> None:
    runs = {"1f1b": made_up_run(40), "2bw": made_up_run(40, milliseconds=80.0, offset=0.5)}
    found = json.loads(json.dumps(report.summary(runs, stages=2, microbatches=4)))
    states = {name: report.state_after(run, 10.4) for name, run in runs.items()}  # the second ends after 10.4 s
    assert [state["batches"] for state in states.values()] == [14, 40]
    last = 8.0 / math.sqrt(40) + 0.1
    assert found == {
        "runs": {
            "1f1b": {"ms_per_batch": 100.0, "valid_loss": pytest.approx(last, abs=1e-12)},
            "2bw": {"ms_per_batch": 80.0, "valid_loss": pytest.approx(last + 0.5, abs=1e-12)},
        },
        "stages": 2,
        "microbatches": 4,
        "equal_time": {
            "seconds": pytest.approx(10.4),
            "runs": {name: pytest.approx(state) for name, state in states.items()},
        },
    }


def test_at_equal_time_a_slower_run_has_done_fewer_batches() -> None:
    run = made_up_run(40, milliseconds=100.0)  # ten batches of 1 s, then thirty of 0.1 s
    assert [report.state_after(run, seconds)["batches"] for seconds in (5.0, 10.15, 99.0)] == [5, 11, 40]
    assert report.state_after(run, 0.1) == {"batches": 1, "lm_loss": 8.0}  # a run that has done none yet: its first
    rows = [{"iteration": step, "lm_loss": 9.0 - 0.1 * step, "iteration_ms": 1e3} for step in range(1, 31)]
    falling = report.Metrics({}, tuple(rows), ())
    assert report.state_after(falling, 20.0) == pytest.approx({"batches": 20, "lm_loss": 7.0})  # no lag


def test_training_gaps_are_between_the_same_batches() -> None:
    runs = {"base": made_up_run(20), "late": made_up_run(20, milliseconds=50.0, offset=0.25)}
    (gaps,) = report.training_gaps(runs, "base").values()
    assert gaps == pytest.approx([0.25] * 20)


def test_summary_of_a_run_without_evaluation_says_so() -> None:
    with pytest.raises(ValueError, match="--eval-interval"):
        report.summary({"a": made_up_run(4, every=100)}, stages=2, microbatches=2)


def test_smoothing_starts_at_the_first_value_and_keeps_constants() -> None:
    assert report.smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0], abs=1e-12)
    assert report.smoothed([1.0, 2.0], 0.5) == pytest.approx([1.0, 5 / 3], abs=1e-12)


def test_gaps_are_taken_where_both_runs_evaluated() -> None:
    runs = {"base": made_up_run(20, every=5), "late": made_up_run(20, every=10, offset=0.25)}
    gaps = report.validation_gaps(runs, "base")
    assert list(gaps) == ["late"]
    assert gaps["late"] == pytest.approx({10: 0.25, 20: 0.25}, abs=1e-12)
    with pytest.raises(ValueError, match="'other' is none of the runs given: base, late"):
        report.validation_gaps(runs, "other")


# traces and pictures


def test_read_trace_keeps_compute_in_milliseconds(tmp_path: Path) -> None:
    spans = report.read_trace(write_trace(tmp_path / "trace.json", 3))
    assert len(spans) == 2 * 3 * 5
    first = spans[0]
    assert (first.kind, first.batch, first.number, first.start, first.end) == ("F", 0, 0, 0.0, 10.0)
    assert [span.number for span in spans if span.kind == "U"] == [0, 0, 1, 1, 2, 2]


def test_a_trace_without_compute_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": trace_events(0)}), encoding="utf-8")
    with pytest.raises(ValueError, match="no forward, backward or update"):
        report.read_trace(path)


def test_steady_window_is_a_whole_number_of_periods(tmp_path: Path) -> None:
    spans = report.read_trace(write_trace(tmp_path / "trace.json", 12, bubble=38.0))
    start, end = report.steady_window(spans, 3)
    assert end - start == pytest.approx(300.0, abs=1e-9)
    assert report.idle_share(spans, 0, (start, end)) == pytest.approx(0.38, abs=1e-9)
    assert report.idle_share(spans, 1, (start, end)) == pytest.approx(0.38, abs=1e-9)


def test_idle_share_counts_overlapping_boxes_once() -> None:
    spans = [report.Span(0, "F", 0, 0, 0.0, 6.0), report.Span(0, "U", 0, 0, 4.0, 8.0)]
    assert report.idle_share(spans, 0, (0.0, 10.0)) == pytest.approx(0.2, abs=1e-12)


def test_loss_figure_shows_every_run_and_its_units() -> None:
    figure = report.loss_figure({"1f1b": made_up_run(), "2bw": made_up_run(offset=0.2)})
    axes, by_time = figure.axes
    assert "nats per token" in axes.get_ylabel()
    assert "time (s)" in by_time.get_xlabel()
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["1f1b", "2bw", "validation"]


def test_a_slower_run_takes_longer_in_the_panel_of_time() -> None:
    """Its curve is the same against batches; against time it ends later."""
    runs = {"1f1b": made_up_run(40, milliseconds=100.0), "2bw": made_up_run(40, milliseconds=50.0)}
    by_batch, by_time = report.loss_figure(runs).axes
    ends = [[line.get_xdata()[-1] for line in axes.lines if line.get_label() in runs] for axes in (by_batch, by_time)]
    assert ends[0] == [40.0, 40.0]
    # Ten slow batches, ten times as long as the other thirty.
    assert ends[1] == pytest.approx([13.0, 6.5])
    assert runs["2bw"].seconds()[11] == pytest.approx(5.05)


def test_timeline_figure_has_a_panel_per_trace_on_one_time_scale(tmp_path: Path) -> None:
    slow = report.read_trace(write_trace(tmp_path / "slow.json", 12, bubble=38.0))
    fast = report.read_trace(write_trace(tmp_path / "fast.json", 12))
    figure = report.timeline_figure({"1f1b": slow, "2bw": fast})
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "1f1b: 100 ms per batch",
        "2bw: 62 ms per batch",
    ]
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, 300.0)}
    assert "(ms)" in figure.axes[-1].get_xlabel()
    assert "idle 38%" in figure.axes[0].get_yticklabels()[0].get_text()


def test_pictures_are_whole_and_leave_no_partial_file(tmp_path: Path) -> None:
    report.save_figure(report.loss_figure({"a": made_up_run()}), tmp_path / "new" / "loss.png")
    assert imread(tmp_path / "new" / "loss.png").shape[:2] == (768, 1760)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["loss.png"]


# the driver

FAKE_TRAINING = """
import json, pathlib, sys
lines = json.loads(pathlib.Path(sys.argv[1]).read_text())
print("working")
with open(sys.argv[2], "a") as file:
    for line in lines:
        file.write(line + "\\n")
sys.exit(int(sys.argv[3]))
"""


def fake_command(tmp_path: Path, files: "quickstart.RunFiles", lines: Sequence[str], status: int = 0) -> list[str]:
    """A command that writes these metrics and ends with this status."""
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(lines), encoding="utf-8")
    return [sys.executable, "-c", FAKE_TRAINING, str(rows), str(files.metrics), str(status)]


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_run_replaces_what_an_earlier_one_left(tmp_path: Path) -> None:
    files = quickstart.RunFiles(tmp_path / "2bw")
    command = fake_command(tmp_path, files, metrics_lines(10))
    for _ in range(2):
        metrics = quickstart.run_training("2bw", command, files, 10, console())
        assert len(metrics.training) == 10
    assert files.log.read_text(encoding="utf-8") == "working\n"


def test_a_failed_run_shows_the_end_of_its_log(tmp_path: Path) -> None:
    files = quickstart.RunFiles(tmp_path / "2bw")
    command = fake_command(tmp_path, files, metrics_lines(4), status=3)
    with pytest.raises(quickstart.RunFailed, match=r"2bw ended with status 3\. The end of (?s:.*)working"):
        quickstart.run_training("2bw", command, files, 10, console())


def test_a_run_that_ends_early_has_failed(tmp_path: Path) -> None:
    files = quickstart.RunFiles(tmp_path / "2bw")
    command = fake_command(tmp_path, files, metrics_lines(9))
    with pytest.raises(quickstart.RunFailed, match=r"wrote 9 batches .* expected 10"):
        quickstart.run_training("2bw", command, files, 10, console())


def test_log_tail_is_short(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("\n".join(str(line) for line in range(100)), encoding="utf-8")
    assert quickstart.log_tail(path, 3) == "97\n98\n99"


class Corpus:
    """The part of a prepared corpus that a command needs."""

    def megatron_arguments(self) -> list[str]:
        return ["--train-data-path", "train", "--valid-data-path", "valid"]


@pytest.mark.parametrize(("iterations", "interval"), [(150, "50"), (100, "50"), (70, "70"), (3, "3")])
def test_commands_differ_in_the_schedule_only_and_evaluate_last(tmp_path: Path, iterations: int, interval: str) -> None:
    files = quickstart.RunFiles(tmp_path)
    commands = {
        name: quickstart.training_command(name, files, model="tiny", iterations=iterations, corpus=Corpus())
        for name in quickstart.RUNS
    }
    common = set.intersection(*(set(command) for command in commands.values()))
    own = {name: [word for word in command if word not in common] for name, command in commands.items()}
    assert own["1f1b"] == ["1f1b", "--trace-file", str(files.trace)]
    assert own["2bw"] == ["2bw", "--trace-file", str(files.trace)]
    assert own["2bw-error-feedback"] == ["2bw", "--staleness-correction", "error-feedback"]
    for command in commands.values():
        assert command[command.index("--eval-interval") + 1] == interval
        assert command[command.index("--train-iters") + 1] == str(iterations)


def test_whole_quick_start_on_made_up_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(name: str, files: Any, **_: object) -> list[str]:
        milliseconds = 100.0 if name == "1f1b" else 62.0
        if name in quickstart.TRACED_RUNS:
            trace = tmp_path / "trace.json"
            copy = f"import shutil; shutil.copy({str(trace)!r}, {str(files.trace)!r})\n"
            write_trace(trace, 12)
        else:
            copy = ""
        made = fake_command(tmp_path / files.folder.name, files, metrics_lines(20, milliseconds=milliseconds))
        made[2] = copy + made[2]
        return made

    for name in quickstart.RUNS:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(quickstart, "prepare_corpus", lambda folder, vocab_size: Corpus())
    monkeypatch.setattr(quickstart, "training_command", command)
    output = tmp_path / "out"
    assert quickstart.main(["--iters", "20", "--output", str(output)]) == 0
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    assert list(summary["runs"]) == ["1f1b", "2bw", "2bw-error-feedback"]
    assert summary["runs"]["2bw"]["ms_per_batch"] == 62.0
    assert (summary["stages"], summary["microbatches"]) == (2, 2)
    assert {"torch", "megatron-core"} <= set(summary["versions"])
    assert (output / "loss.png").stat().st_size > 10_000
    assert (output / "timeline.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "1.61x" in shown
    assert "validation" in shown
    assert "Then: after 7 s of training" in shown  # ten batches of 0.62 s, ten of 0.062 s
    words = " ".join(shown.split())
    assert "2bw by up to 0.00" in words and "Batches at equal time: 1f1b 6, 2bw 20" in words
    assert "takes a part of the lag back" not in words


def test_explanations_are_given_where_the_figures_show_them() -> None:
    def run(*lags: float) -> report.Metrics:
        rows = [{"iteration": i, "lm_loss": 5.0 + lag, "iteration_ms": 1e3} for i, lag in enumerate(lags, start=1)]
        return report.Metrics({}, tuple(rows), ({"iteration": len(lags), "valid_loss": 5.0},))

    def text(delayed: report.Metrics, corrected: report.Metrics) -> str:
        metrics = {"1f1b": run(*[0.0] * 8), "2bw": delayed, "2bw-error-feedback": corrected}
        return quickstart.lag_text(metrics, report.summary(metrics, stages=2, microbatches=2))

    early = text(run(0, 2, 0, 0, 0, 0, 0, 0), run(*[0.0] * 8))
    assert "builds up early, while the learning rate warms up" in early and "takes a part of the lag back" in early
    late = text(run(*[0.0] * 8), run(0, 0, 0, 0, 0, 0, 1, 2))
    assert "builds up" not in late and "takes a part" not in late


def test_a_failed_quick_start_leaves_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "prepare_corpus", lambda folder, vocab_size: Corpus())
    monkeypatch.setattr(quickstart, "training_command", lambda *_, **__: [sys.executable, "-c", "raise SystemExit(7)"])
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    assert quickstart.main(["--iters", "2", "--output", str(tmp_path)]) == 1
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("arguments", [["--iters", "0"], ["--iters", "many"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quickstart.main(arguments)


# tools/plot_runs.py


def write_metrics(path: Path, **options: float) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(metrics_lines(20, **options)) + "\n", encoding="utf-8")  # type: ignore[arg-type]
    return path


def test_plot_runs_writes_pictures_and_a_gap_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_metrics(tmp_path / "base" / "metrics.jsonl")
    other = write_metrics(tmp_path / "other" / "metrics.jsonl", offset=0.25)
    assert plot_runs.main([str(base), f"delayed={other}", "--output", str(tmp_path / "plots")]) == 0
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"loss.png", "gap.png"}
    assert "+0.2500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a=missing.jsonl"], "missing.jsonl"),
        (["a=x", "a=y"], "more than one run is called a"),
        (["a=x", "--reference", "b"], "--reference b: none of the runs given (a)"),
    ],
)
def test_plot_runs_names_the_problem(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        plot_runs.main(arguments)
    assert complaint in capsys.readouterr().err


def test_the_benchmark_measures_the_quick_start():
    arguments, micro_batch_size = whole.MODELS["tiny"]
    assert (whole.VOCABULARY, micro_batch_size) == (quickstart.VOCAB_SIZE, quickstart.MICRO_BATCH_SIZE)
    assert quickstart.LAYOUTS["tiny"] in arguments
