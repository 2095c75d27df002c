# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Time on one GPU, within five minutes, the steps that a delayed schedule adds: versions, generations, host copies.

python tools/benchmark_gpu.py --json runs/benchmarks/gpu.json

--device cpu only shows that the steps run: small tensors, and times that say nothing about a GPU.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks import results
from megatron_async import platform


def timed(action: Callable[[], object], device: str, repeats: int) -> dict[str, float]:
    """Median milliseconds on the device, and until the host is free again."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        action()
    whole, host = [], []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        action()
        host.append((time.perf_counter() - start) * 1e3)
        wait()
        whole.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(whole), "host_ms": statistics.median(host)}


def steps(options: argparse.Namespace) -> Mapping[str, Callable[[], object]]:
    """What is timed: the steps of a stage of four matrices for each layer, by name."""
    from megatron_async.optim.algorithms.muon import orthogonalize
    from megatron_async.pipeline.pointers import ParameterPointer
    from megatron_async.pipeline.weights import WeightVersions
    from megatron_async.platform.host import HostValues

    width = options.hidden
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * options.layers
    bf16 = {"device": options.device, "dtype": torch.bfloat16}
    weights = [torch.nn.Parameter(torch.randn(shape, **bf16)) for shape in shapes]
    gradients = [torch.randn(shape, device=options.device) for shape in shapes]
    source = torch.randn(options.tokens, width, **bf16, requires_grad=True)
    versions = WeightVersions([ParameterPointer(weight) for weight in weights], limit=2)

    def publish() -> None:
        newest = versions.newest
        versions.open_next()
        versions.publish_next(newest + 1)

    def forward_and_backward() -> None:
        linear, x = torch.nn.functional.linear, source
        for to_qkv, merge, widen, narrow in zip(*(weights[start::4] for start in range(4)), strict=True):
            x = x + linear(linear(x, to_qkv)[:, :width], merge)
            x = x + linear(torch.nn.functional.gelu(linear(x, widen)), narrow)
        x.float().square().mean().backward()

    publish()
    return {
        "forward and backward of a micro-batch": forward_and_backward,
        "publish a weight version": publish,
        "switch between two versions": lambda: [versions.use(version) for version in versions.alive],
        "clear a generation of gradients": lambda: [gradient.zero_() for gradient in gradients],
        "norm on its way to the host": lambda: HostValues(torch.nn.utils.get_total_norm(gradients).view(1)),
        "Newton-Schulz of all matrices": lambda: [orthogonalize(gradient) for gradient in gradients],
    }


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for wrong arguments."""
    parser = results.make_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=8, help="layers of the stage (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no usable GPU; --device cpu only shows that the steps run")
    options.hidden, options.tokens = (4096, 8192) if options.device == "cuda" else (64, 64)
    platform.activate_or_exit(options.device)
    torch.set_float32_matmul_precision("medium")
    used = results.machine()
    used["device"] = torch.cuda.get_device_name(0) if options.device == "cuda" else None
    times = {name: timed(action, options.device, options.repeats) for name, action in steps(options).items()}
    settings = {key: getattr(options, key) for key in ("layers", "hidden", "tokens")}
    lines = [[name, f"{found['ms']:.3f}", f"{found['host_ms']:.3f}"] for name, found in times.items()]
    text = results.table(["step", "ms", "host free after, ms"], lines)
    results.publish(options, used, "Steps of a stage", text, settings | {"times": times})
    return 0


if __name__ == "__main__":
    sys.exit(main())
