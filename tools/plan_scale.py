# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Steps, bubbles and memory on 64 to 4,096 devices, simulated from stated assumptions.

python tools/plan_scale.py
python tools/plan_scale.py --utilization 0.5 --devices 2048 4096
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or put them into a document."""
    from benchmarks import document, scale

    standard = scale.Assumptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=list(scale.DEVICES))
    parser.add_argument("--flops", type=float, default=standard.flops, help="peak of a device (default: %(default)g)")
    parser.add_argument("--utilization", type=float, default=standard.utilization, help="(default: %(default)g)")
    parser.add_argument("--stage-bandwidth", type=float, default=standard.stage_bandwidth, help="bytes per second")
    parser.add_argument("--reduce-bandwidth", type=float, default=standard.reduce_bandwidth, help="bytes per second")
    parser.add_argument("--update", type=Path, metavar="FILE", help="document whose section 'scale' is replaced")
    options = parser.parse_args(arguments)
    rates = (options.flops, options.utilization, options.stage_bandwidth, options.reduce_bandwidth)
    if min(rates) <= 0:
        parser.error(f"rates {rates}: all must be positive")
    text = scale.report(
        scale.Assumptions(
            flops=options.flops,
            utilization=options.utilization,
            stage_bandwidth=options.stage_bandwidth,
            reduce_bandwidth=options.reduce_bandwidth,
        ),
        options.devices,
    )
    if options.update:
        document.replace_section(options.update, "scale", text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
