# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Loss curves of several runs, and how far their validation losses are from a reference run's.

tools/plot_runs.py sync=runs/a/metrics.jsonl delayed=runs/b/metrics.jsonl --reference sync --output runs/plots
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/ is not installed

from megatron_async import report


def _named_path(text: str) -> tuple[str, Path]:
    """NAME=PATH, or a path whose folder gives the name."""
    name, separator, path = text.partition("=")
    return (name, Path(path)) if separator else (Path(text).resolve().parent.name, Path(text))


def _gap_table(runs: dict[str, report.Metrics], reference: str) -> Table:
    table = Table(title=f"Validation loss, gap to {reference}")
    for heading in ("run", "iteration", "validation loss", "gap"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    gaps = report.validation_gaps(runs, reference)
    for name, metrics in runs.items():
        if not metrics.validation:
            table.add_row(name, "-", "-", "-")
            continue
        last = metrics.validation[-1]
        gap = gaps.get(name, {}).get(last["iteration"])
        shown = "-" if gap is None else f"{gap:+.4f}"
        table.add_row(name, str(last["iteration"]), f"{last['valid_loss']:.4f}", shown)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=_named_path, metavar="NAME=FILE", help="metrics files")
    parser.add_argument("--reference", help="run that gaps are measured against (default: the first)")
    parser.add_argument("--output", type=Path, default=Path("runs/plots"), help="folder (%(default)s)")
    parser.add_argument(
        "--format", choices=("png", "svg", "pdf"), default="png", help="of the pictures (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    names = [name for name, _ in options.runs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"more than one run is called {', '.join(repeated)}: name them with NAME=FILE")
    reference = options.reference or names[0]
    if reference not in names:
        parser.error(f"--reference {reference}: none of the runs given ({', '.join(names)})")
    try:
        runs = {name: report.read_metrics(path) for name, path in options.runs}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    report.save_figure(report.loss_figure(runs), options.output / f"loss.{options.format}")
    report.save_figure(report.gap_figure(runs, reference), options.output / f"gap.{options.format}")
    console = Console()
    console.print(_gap_table(runs, reference))
    console.print(f"Pictures: {options.output}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
