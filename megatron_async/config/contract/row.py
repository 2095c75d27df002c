# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A row of the contract: options that share a status and its reason."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_async.schedules.arguments import is_delayed

Status = Literal["as in Megatron", "refused", "inert here"]

DELAYED = "with a gradient delay"
ON_CPU = "on CPUs"
WITHOUT_LATENTS = "without --multi-latent-attention"

CONDITIONS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "": lambda args: True,
    DELAYED: is_delayed,
    ON_CPU: lambda args: args.device == "cpu",
    WITHOUT_LATENTS: lambda args: not args.multi_latent_attention,
}
"""When a row holds: its text in messages -> parsed arguments -> bool."""


@dataclass(frozen=True, slots=True)
class Row:
    """Options of one status.

    Attributes:
        status: of all of them.
        options: flags without leading dashes, separated by spaces; `flag=value` is one value of a flag.
        reason: as in Megatron: how the value takes effect. Refused: why. Inert: why it cannot matter.
        instead: of refused options: what to do.
        shown_by: of options as in Megatron: the test that shows their effect.
        rule: of refused options: the module whose rule refuses them with the numbers at hand; "" for the table's own.
        when: a key of `CONDITIONS`. A row with a condition, or with one value of a flag, adds to the flag's own row.
    """

    status: Status
    options: str
    reason: str
    instead: str = ""
    shown_by: str = ""
    rule: str = ""
    when: str = ""

    @property
    def entries(self) -> list[tuple[str, str | None]]:
        """(flag without dashes, value or None) of every option."""
        parts = (option.partition("=") for option in self.options.split())
        return [(flag, value if equals else None) for flag, equals, value in parts]

    def sentence(self) -> str:
        """Status, reason and what goes with it."""
        condition = f" {self.when}" if self.when else ""
        more = f" {self.instead}" if self.instead else f" Shown by {self.shown_by}." if self.shown_by else ""
        return f"{self.status}{condition}: {self.reason}.{more}"


def refused(options: str, reason: str, instead: str = "Leave it out.", when: str = "", rule: str = "") -> Row:
    """A row of refused options."""
    return Row("refused", options, reason, instead, rule=rule, when=when)
