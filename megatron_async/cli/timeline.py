# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The measured timeline of a run beside its plan, and the idle time by cause.

megatron-async timeline --trace trace.json --schedule 2bw --output timeline.png

The plan is the simulated schedule with the median forward, backward and update of every stage in the trace
(`--trace-file`). What the measured batch takes beyond it are transfers, waits for the host, and times that vary.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from megatron_async.cli import make_parser, refuse
from megatron_async.planning.timing import BATCHES, period, simulator
from megatron_async.report import read_trace, save_figure, steady_window, timeline_figure
from megatron_async.schedules import SCHEDULES, StageCosts, schedule_problems
from megatron_async.schedules.figure import Span, spans_of


def measured_costs(spans: Sequence[Span], chunks: int) -> list[StageCosts]:
    """Medians of every stage, in ms, without the first batch, which compiles and allocates.

    Raises:
        ValueError: a stage has no forward, backward or update after the first batch.
    """
    first, times = min(span.batch for span in spans), defaultdict(list)
    for span in spans:
        if span.batch > first:
            times[span.rank, span.chunk, span.kind].append(span.end - span.start)
    stages = range(max(span.rank for span in spans) + 1)
    needed = [(stage, chunk, kind) for stage in stages for chunk in range(chunks) for kind in "FBU"]
    if missing := [key for key in needed if key not in times]:
        stage, chunk, kind = missing[0]
        raise ValueError(f"the trace has no {kind} of stage {stage}, chunk {chunk} after its first batch")
    costs = []
    for stage in stages:
        own = {(chunk, kind): statistics.median(times[stage, chunk, kind]) for chunk in range(chunks) for kind in "FBU"}
        forward, backward, update = (sum(own[chunk, kind] for chunk in range(chunks)) for kind in "FBU")
        compute = [own[chunk, "F"] + own[chunk, "B"] for chunk in range(chunks)]
        shares = tuple(part / sum(compute) for part in compute) if chunks > 1 else ()
        costs.append(StageCosts(forward, backward, update, shares))
    return costs


def causes(name: str, costs: Sequence[StageCosts], microbatches: int, measured: float) -> dict[str, float]:
    """Milliseconds of a measured batch: compute of the mean stage, then what each cause adds."""
    made = simulator(name, len(costs), microbatches)
    totals = [microbatches * (own.forward + own.backward) for own in costs]
    alone = [StageCosts(own.forward, own.backward, shares=own.shares) for own in costs]
    steps = [sum(totals) / len(totals), max(totals), period(made, alone), period(made, costs), measured]
    names = ("imbalance", "schedule", "update", "transfers, host and jitter")
    added = (later - earlier for earlier, later in pairwise(steps))
    return {"compute": steps[0], **dict(zip(names, added, strict=True))}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("timeline", __doc__)
    delayed = [name for name, own in SCHEDULES.items() if not own.megatron and not own.update_per_microbatch]
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="file that a run wrote with --trace-file")
    add("--schedule", choices=delayed, required=True, help="schedule of the run")
    add("--output", type=Path, metavar="FILE", default=Path("timeline.png"), help="picture (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a file that is not the trace of such a run."""
    options = _parse(argv)
    try:
        spans = read_trace(options.trace)
        costs = measured_costs(spans, SCHEDULES[options.schedule].chunks)
        batches = {span.batch for span in spans}
        forward = 0, "F", 0, max(batches)
        stages = len(costs)
        microbatches = sum((span.rank, span.kind, span.chunk, span.batch) == forward for span in spans)
        if problems := schedule_problems(options.schedule, stages=stages, microbatches=microbatches, batches=BATCHES):
            raise ValueError(f"not a trace of {options.schedule}: {'; '.join(problems)}")
    except (OSError, ValueError, KeyError) as error:
        return refuse("timeline", "nothing was drawn", [f"--trace {options.trace}: {error}"])
    kept = min(3, max(1, len(batches) - 2))
    start, end = steady_window(spans, kept)
    measured = (end - start) / (kept if len(batches) > kept + 1 else len(batches))
    found = causes(options.schedule, costs, microbatches, measured)
    print(f"measured batch: {measured:.1f} ms, {stages} stages, {microbatches} micro-batches")
    for cause, milliseconds in found.items():
        print(f"  {cause:28} {milliseconds:9.1f} ms {milliseconds / measured:7.1%}")
    plan = simulator(options.schedule, stages, microbatches)
    planned = spans_of(plan.schedule, plan.run(costs))
    save_figure(timeline_figure({"measured": spans, "planned": planned}, kept), options.output)
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
