# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A row of the contract: options that share a status and its reason."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_async.schedules.arguments import is_delayed

Status = Literal["as in Megatron", "refused", "inert here"]

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


_ROW = re.compile(r"^((?:[^ #\n].*\n)+)((?: +.*\n)+)", re.MULTILINE)


def table(status: Status, text: str) -> tuple[Row, ...]:
    """The rows of a table: the reason in unindented lines, then the options in indented ones. "#" begins a heading.

    A reason may begin with a condition and a colon; that of options as in Megatron begins with the test. After the
    reason of a refusal stands, in sentences of its own, what to do; by default the option is to be left out.
    """
    rows = []
    for words, options in _ROW.findall(text):
        first, _, rest = (reason := " ".join(words.split())).partition(": ")
        by, when = (first, "") if status == "as in Megatron" else ("", first if first in CONDITIONS else "")
        reason, instead = rest if by or when else reason, ""
        if status == "refused":
            reason, _, instead = reason.removesuffix(".").partition(". ")
            instead = f"{instead or 'Leave it out'}."
        rows.append(Row(status, tuple(options.split()), reason, instead, by, when))
    return tuple(rows)
