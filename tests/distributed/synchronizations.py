# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Job that finds what would make the host wait for a GPU: operators whose result the host needs."""

import traceback
from collections.abc import Sequence
from typing import Any

from tests.distributed.jobs import BASE

# On a GPU these copy to the host, or size their result by values on the device.
OPERATORS = (
    "_local_scalar_dense equal is_nonzero nonzero masked_select _unique2 unique_consecutive bincount "
    "repeat_interleave item histc"
).split()


def synchronizations(arguments: Sequence[str]) -> dict[str, int]:
    """Train; from the third batch on, count such operators by the place in the package or Megatron that called them.

    Returns:
        "file:function operator" -> calls.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron_async.config import arguments as command_line
    from megatron_async.training import run
    from megatron_async.training.callbacks import Callback

    found: dict[str, int] = {}
    steady = False

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.overloadpacket.__name__
            indexed = name == "index" and any(
                isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
            )
            if steady and (name in OPERATORS or indexed):
                key = f"{_caller()} {name}"
                found[key] = found.get(key, 0) + 1
            return function(*args, **(kwargs or {}))

    class Steady(Callback):
        def on_action(self, kind: str, batch: int) -> None:
            nonlocal steady
            steady = steady or batch == 3

        def on_drain(self) -> None:
            nonlocal steady
            steady = False

    loop = run.build(command_line.parse([*BASE, *arguments]), callbacks=[Steady()])
    with Watch():
        loop.run()
    run.close()
    return found


def _caller() -> str:
    """The innermost frame of the package, of Megatron or of emerging-optimizers; else of torch."""
    frames = [frame for frame in traceback.extract_stack() if "synchronizations.py" not in frame.filename]
    for frame in reversed(frames):
        for package in ("megatron_async", "megatron", "emerging_optimizers"):
            if (at := frame.filename.rfind(f"/{package}/")) >= 0:
                return f"{frame.filename[at + 1 :]}:{frame.name}"
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}"
