# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Time on one GPU, within five minutes, what a delayed schedule adds to a stage: versions, generations, host copies.

python tools/benchmark_gpu.py --json runs/benchmarks/gpu.json

--device cpu runs the same steps on small tensors, to see that they run; its times say nothing about a GPU.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_async import platform

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="result")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=8, help="layers of the stage (default: %(default)s)")
    parser.add_argument("--hidden", type=int, help="width (default: 4096 on a GPU, 64 on a CPU)")
    parser.add_argument("--tokens", type=int, help="of a micro-batch (default: 8192 on a GPU, 64 on a CPU)")
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions (default: %(default)s)")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("torch finds no usable GPU; --device cpu shows only that the steps run")
    options.hidden = options.hidden or (4096 if on_gpu else 64)
    options.tokens = options.tokens or (8192 if on_gpu else 64)
    return options


def timed(action: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    """Milliseconds on the device and milliseconds until the host is free again: medians."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
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


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for wrong arguments."""
    options = parse(arguments)
    platform.activate(options.device)
    from benchmarks import machine
    from megatron_async.files import write_atomically
    from megatron_async.optim.algorithms.muon import orthogonalize
    from megatron_async.pipeline.pointers import ParameterPointer
    from megatron_async.pipeline.weights import WeightVersions
    from megatron_async.platform.host import HostValues

    device, width = torch.device(options.device), options.hidden
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * options.layers
    weights = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in shapes]
    versions = WeightVersions([ParameterPointer(weight) for weight in weights], limit=2)
    gradients = [torch.randn(shape, device=device) for shape in shapes]
    source = torch.randn(options.tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def publish() -> None:
        newest = versions.newest
        versions.open_next()
        versions.publish_next(newest + 1)

    def switch() -> None:
        for version in versions.alive:
            versions.use(version)

    def forward_and_backward() -> None:
        x = source
        for to_qkv, merge, widen, narrow in zip(*(weights[start::4] for start in range(4)), strict=True):
            x = x + torch.nn.functional.linear(torch.nn.functional.linear(x, to_qkv)[:, :width], merge)
            x = x + torch.nn.functional.linear(torch.nn.functional.gelu(torch.nn.functional.linear(x, widen)), narrow)
        x.float().square().mean().backward()

    def clear() -> None:
        torch._foreach_zero_(gradients)

    def norm_to_host() -> None:
        HostValues(torch.stack(list(torch._foreach_norm(gradients))))

    torch.set_float32_matmul_precision("medium")
    actions = {
        "forward and backward of a micro-batch": forward_and_backward,
        "publish a weight version": publish,
        "switch between two versions": switch,
        "clear a generation of gradients": clear,
        "norm on its way to the host": norm_to_host,
        "Newton-Schulz of all matrices": lambda: [orthogonalize(gradient) for gradient in gradients],
    }
    publish()
    used = machine.describe() | {"device": torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"}
    result = {
        "machine": used,
        "parameters": sum(weight.numel() for weight in weights),
        "tokens": options.tokens,
        "times": {name: timed(action, device, options.repeats) for name, action in actions.items()},
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    for name, times in result["times"].items():
        print(f"{name:42} {times['ms']:10.3f} ms, host free after {times['host_ms']:.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
