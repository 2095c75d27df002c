# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One replaced name of torch or Megatron."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """A name to replace, with the reason.

    Attributes:
        target: dotted name, `module:attribute[.attribute]`.
        reason: why the replacement is needed.
        answers: `file: text`, a Megatron file below `megatron/` and a text in it that makes it necessary. A test looks
            it up in the installed wheel.
        replace: maps the original object to its replacement; None for a temporary patch, which gets it when it is used.
        devices: where a permanent patch is installed.
    """

    target: str
    reason: str
    answers: str
    replace: Callable[[Any], Any] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")

    def locate(self) -> tuple[Any, str]:
        """Return the object that owns the attribute, and the attribute's name. Imports the target's module."""
        module, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name

    def apply(self) -> None:
        """Replace the name in this process for good."""
        assert self.replace is not None, f"{self.target} is replaced for a time only"
        owner, name = self.locate()
        setattr(owner, name, self.replace(getattr(owner, name)))

    def put(self, value: Any) -> None:
        """Replace the name by a value, until Megatron itself sets it anew."""
        owner, name = self.locate()
        setattr(owner, name, value)

    @contextmanager
    def replaced(self, replace: Callable[[Any], Any]) -> Iterator[None]:
        """Replace the name inside the block; `replace` maps the original to its replacement."""
        owner, name = self.locate()
        original = getattr(owner, name)
        setattr(owner, name, replace(original))
        try:
            yield
        finally:
            setattr(owner, name, original)
