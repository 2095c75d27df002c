# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A row of the contract: options that share a status and its reason."""

import argparse
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_async.schedules.arguments import is_delayed

Status = Literal["as in Megatron", "refused", "inert here"]
STATUSES: dict[str, Status] = {"as-in-megatron": "as in Megatron", "refused": "refused", "inert": "inert here"}
"""By their keys in options.toml."""

CONDITIONS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "": lambda args: True,
    "with a gradient delay": is_delayed,
    "on CPUs": lambda args: args.device == "cpu",
    "without --multi-latent-attention": lambda args: not args.multi_latent_attention,
}
"""When a row holds: its text in messages -> parsed arguments -> bool."""


@dataclass(frozen=True, slots=True)
class Row:
    """Options of one status.

    Attributes:
        status: of all of them.
        options: flags without leading dashes; `flag=value` is one value of a flag, `rl-*` a family of flags.
        reason: as in Megatron: how the value takes effect. Refused: why. Inert: why it cannot matter.
        instead: of refused options: what to do.
        shown_by: of options as in Megatron: the test that shows their effect.
        when: a key of `CONDITIONS`. A row with a condition, or with one value of a flag, adds to the flag's own row.
    """

    status: Status
    options: tuple[str, ...]
    reason: str
    instead: str = ""
    shown_by: str = ""
    when: str = ""

    @property
    def entries(self) -> list[tuple[str, str | None]]:
        """(flag without dashes, value or None) of every option."""
        parts = (option.partition("=") for option in self.options)
        return [(flag, value if equals else None) for flag, equals, value in parts]

    def sentence(self) -> str:
        """Status, reason and what goes with it."""
        condition = f" {self.when}" if self.when else ""
        more = f" {self.instead}" if self.instead else f" Shown by {self.shown_by}." if self.shown_by else ""
        return f"{self.status}{condition}: {self.reason}.{more}"


def read() -> tuple[Row, ...]:
    """The rows of options.toml."""
    content = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
    defaults = {"refused": {"instead": "Leave it out."}}
    return tuple(
        Row(status, **defaults.get(key, {}) | row | {"options": tuple(row["options"].split())})
        for key, status in STATUSES.items()
        for row in content[key]
    )
