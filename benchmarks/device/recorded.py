# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Times of the stages from the timeline of a run (`--trace-file`)."""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from benchmarks.device.costs import StageTimes


def recorded_times(trace: Mapping[str, Any], *, reduction: float = 0.0, gather: float = 0.0) -> list[StageTimes]:
    """Medians of each stage over micro-batches and replicas, without the first batch, which compiles kernels.

    Args:
        trace: the contents of a trace file: spans of F, B and U, and of R where they are recorded.
        reduction: time of the reductions in ms, for stages without spans of R.
        gather: time of the gather in ms. A recorded U holds the step, and the gather where the run waited for it.

    Raises:
        ValueError: not a trace of a run, or spans are missing.
    """
    try:
        spans = [event for event in trace["traceEvents"] if "kind" in event.get("args", {})]
        first = min((event["args"]["batch"] for event in spans), default=0)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError("not a trace file of a run") from error
    durations: dict[tuple[int, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in spans:
        if event["args"]["batch"] > first:
            own = durations[event["tid"], event["args"]["kind"]]
            own[event["args"].get("chunk", 0)].append(event["dur"] / 1000)
    stages = sorted({stage for stage, _ in durations})
    problems = [f"stage {stage} has no {kind}" for stage in stages for kind in "FBU" if (stage, kind) not in durations]
    if not stages or stages != list(range(len(stages))):
        problems.append(f"spans of stages {stages}: stages 0, 1, .. are needed")
    if problems:
        raise ValueError(f"the trace, without its first batch: {'; '.join(problems)}")

    def median(stage: int, kind: str) -> float:
        return sum(map(statistics.median, durations[stage, kind].values()))

    return [
        StageTimes(
            forward=median(stage, "F"),
            backward=median(stage, "B"),
            step=median(stage, "U"),
            reduction=median(stage, "R") if (stage, "R") in durations else reduction,
            gather=gather,
        )
        for stage in stages
    ]
