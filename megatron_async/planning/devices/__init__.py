# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Devices as data: one TOML file each, with sources. `--plan-device` takes a name from here or the path of a file."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.files import write_atomically

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
DEFAULT = "h100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device, its links and its host.

    Attributes:
        name: of the file.
        description, source: which device, and where its figures come from.
        flops: dense peak by precision, FLOP/s.
        efficiency: share of the peak that a training run reaches; `efficiency_source` says who measured it.
        memory_gib: memory.
        memory_bandwidth: bytes/s.
        bandwidth_inside, bandwidth_between: bytes/s of each device and direction, inside a node and between nodes.
        devices_per_node: devices of a node.
        launch_seconds: host time of one kernel launch.
    """

    name: str
    description: str
    source: str
    flops: Mapping[str, float]
    efficiency: float
    efficiency_source: str
    memory_gib: float
    memory_bandwidth: float
    bandwidth_inside: float
    bandwidth_between: float
    devices_per_node: int
    launch_seconds: float

    def speed(self, precision: str) -> float:
        """FLOP/s in use; a precision without a figure counts as bf16."""
        return self.flops.get(precision, self.flops["bf16"]) * self.efficiency

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    def bandwidth(self, devices: int) -> float:
        """Bytes/s between neighbors in a group that spans so many devices in a row."""
        return self.bandwidth_inside if devices <= self.devices_per_node else self.bandwidth_between


_TEXTS = ("description", "source", "efficiency_source")
_NUMBERS = tuple(name for name in Device.__slots__ if name not in (*_TEXTS, "name", "flops"))


def find(name: str) -> Device:
    """The device of a name or of a file.

    Raises:
        ValueError: with everything that is wrong.
    """
    path = FOLDER / f"{name}.toml" if name in NAMES else Path(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{name}: no such device or file. Known: {', '.join(NAMES)}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from None
    values: dict[str, Any] = {key.replace("-", "_"): value for key, value in table.items()}
    problems = [f"{key.replace('_', '-')} is missing" for key in (*_TEXTS, *_NUMBERS, "flops") if key not in values]
    problems += [f"{key.replace('_', '-')} is unknown" for key in values if key not in Device.__slots__[1:]]
    for key in _NUMBERS:
        if key in values and not _is_positive(values[key]):
            problems.append(f"{key.replace('_', '-')} {values[key]!r}: must be a positive number")
    speeds = values.get("flops", {"bf16": 1.0})
    if not isinstance(speeds, dict) or "bf16" not in speeds or not all(map(_is_positive, speeds.values())):
        problems.append("flops: must be a table of positive numbers with bf16")
    if problems:
        raise ValueError(f"device {name}: {'; '.join(problems)}.")
    return Device(name=path.stem, **values)


def write(path: Path, device: Device) -> None:
    """Write a device file."""
    texts = [f"{key.replace('_', '-')} = {json.dumps(getattr(device, key), ensure_ascii=False)}" for key in _TEXTS]
    numbers = [f"{key.replace('_', '-')} = {getattr(device, key):.6g}" for key in _NUMBERS]
    speeds = [f"{key} = {value:.6g}" for key, value in device.flops.items()]
    write_atomically(path, "\n".join([*texts, *numbers, "", "[flops]", *speeds, ""]))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
