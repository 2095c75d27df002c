# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Rules for corrections of stale gradients and for statistics of updates."""

import argparse
import math
from collections.abc import Iterator

from megatron_async.schedules import is_delayed


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Problems with parsed values."""
    yield from _correction(args)
    if args.log_update_statistics < 0:
        yield f"--log-update-statistics {args.log_update_statistics}: must be at least 0; 0 is never."


def _correction(args: argparse.Namespace) -> Iterator[str]:
    if not math.isfinite(args.correction_strength) or args.correction_strength < 0:
        yield f"--correction-strength {args.correction_strength}: must be a finite number, at least 0."
    if args.correction_strength != 1.0 and args.staleness_correction == "none":
        yield "--correction-strength without --staleness-correction would be ignored: name a correction."
    if args.staleness_correction != "none" and not is_delayed(args):
        yield (
            f"--staleness-correction {args.staleness_correction} corrects one-step-old gradients, but "
            "--pipeline-schedule 1f1b has none. Use --pipeline-schedule 2bw (or --gradient-delay), or leave the "
            "correction out."
        )
