# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's command line: its options and its validation."""

import argparse
import contextlib
import io
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.training.arguments import add_megatron_arguments, validate_args

from megatron_async.mcore.patches import temporary
from megatron_async.schedules.arguments import schedule_of


def add_megatron_options(parser: argparse.ArgumentParser, *, texts: bool = True) -> None:
    """Add every Megatron-LM option to `parser`, in Megatron's groups; `texts`: all help texts, which take time."""
    unread = temporary.OPTION_TEXTS.replaced(lambda original: lambda self, dataclass: {})
    with contextlib.nullcontext() if texts else unread:
        add_megatron_arguments(parser)


def words(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give Megatron's arguments, by destination, these values; None leaves one out."""
    parser = argparse.ArgumentParser()
    add_megatron_options(parser, texts=False)
    actions = {action.dest: action for action in parser._actions}
    found: list[str] = []
    for name, value in values.items():
        (option, *_), switch = actions[name].option_strings, actions[name].nargs == 0
        if value == actions[name].const if switch else value is not None:
            found += [option] if switch else [option, str(value)]
    return found


def rank_from_environment(args: argparse.Namespace) -> None:
    """Set the arguments that Megatron's `parse_args` takes from the environment: rank, world size, storage client."""
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.enable_msc:
        MultiStorageClientFeature.enable()
    else:
        MultiStorageClientFeature.disable()


def check_arguments(args: argparse.Namespace) -> str | None:
    """Run Megatron's own validation (it also derives values). Return its first objection, or None.

    Megatron stops at its first failed check, with an assertion, an exception or `exit()`.
    """
    printed = io.StringIO()
    # Megatron's asynchronous saves need a worker process of its own; ours do not.
    hidden = {"async_save": False}
    if args.transformer_impl == "local":
        # Megatron has attention logits from Transformer Engine alone; `watch_logits` has them from the local attention
        # too (training/arguments.py: '--qk-clip is only supported with TE >= 2.9.0.').
        hidden |= {"qk_clip": False, "log_max_attention_logit": False}
    queues: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if schedule_of(args).delayed:
        queues = temporary.DEVICE_GENERATION.replaced(lambda original: lambda: 10)
    try:
        with contextlib.redirect_stdout(printed), overridden(args, **hidden), queues:
            validate_args(args)
    except SystemExit:
        return printed.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return objection_of(error)
    return None


@contextlib.contextmanager
def overridden(args: argparse.Namespace, **values: Any) -> Iterator[None]:
    """Temporarily override arguments."""
    before = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(before)


def objection_of(error: BaseException) -> str:
    """The message of an error of Megatron's; of an assertion without one, its source line."""
    if str(error) and isinstance(error, AssertionError | ValueError | RuntimeError | TypeError | ImportError):
        return str(error)
    line = traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    line = re.sub(r"\bargs\.(\w+)", lambda name: f"--{name[1].replace('_', '-')}", line)
    what = "requires" if isinstance(error, AssertionError) else f"fails with {type(error).__name__} {error} at"
    return f"Megatron {what}: {line.removeprefix('assert ')}"
