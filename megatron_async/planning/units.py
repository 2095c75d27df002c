# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Numbers for people. Standard library alone."""

_AMOUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def amount(count: float) -> str:
    """A number of parameters: 134.5M, 10.12B."""
    unit, name = next((scale for scale in _AMOUNTS if count >= scale[0]), (1, ""))
    return f"{count / unit:.4g}{name}"


def size(count: float) -> str:
    """A number of bytes: 3.2 GiB."""
    unit, name = next((scale for scale in _SIZES if count >= scale[0]), (1, "B"))
    return f"{count / unit:.{0 if unit == 1 else 1}f} {name}"
