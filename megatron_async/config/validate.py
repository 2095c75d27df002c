# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every check of a command line: each package states its rules, this module only lists them.

A broken rule gives one line: the given value, the rule with its numbers, and what to change.
"""

import argparse
from collections.abc import Callable, Iterable

from megatron_async.checkpoint import rules as checkpoint
from megatron_async.data.blend import data_sources, missing_data_files
from megatron_async.data.index_cache import contents
from megatron_async.models import rules as models
from megatron_async.optim import rules as optim
from megatron_async.pipeline import rules as pipeline
from megatron_async.reference import rules as reference
from megatron_async.training import rules as training

Rules = Callable[[argparse.Namespace], Iterable[str]]

_ON_PARSED_VALUES: tuple[Rules, ...] = (
    reference.problems,
    training.problems,
    pipeline.problems,
    models.problems,
    checkpoint.problems,
)
_ON_DERIVED_VALUES: tuple[Rules, ...] = (
    pipeline.derived_problems,
    training.derived_problems,
    checkpoint.derived_problems,
    models.derived_problems,
)


def before_megatron(args: argparse.Namespace, given: frozenset[str]) -> list[str]:
    """Problems with parsed values.

    Args:
        given: destinations of the options that the command line names.
    """
    problems = list(optim.problems(args, given))
    problems += (problem for rules in _ON_PARSED_VALUES for problem in rules(args))
    if not args.dry_run:
        wrong = missing_data_files(args)
        problems += wrong
        args.data_contents = None if wrong or args.mock_data else contents(data_sources(args))
    return problems


def after_megatron(args: argparse.Namespace) -> list[str]:
    """Problems with the values that Megatron's own validation has derived."""
    return [problem for rules in _ON_DERIVED_VALUES for problem in rules(args)]
