# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The parser: this package's options, the optimizers' hyper-parameters, every Megatron-LM option."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from megatron_async.config.options import add_options
from megatron_async.launcher import is_first_rank
from megatron_async.mcore.arguments import add_megatron_options
from megatron_async.optim import options

_USAGE = "torchrun --nproc-per-node N -m megatron_async.pretrain [options]"
_EXAMPLES = """\
examples:
  --model list                 print the model presets
  --optimizer list             print the optimizers with their hyper-parameters
  --model smollm2-135m --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --dry-run
                               print parameters, memory and schedule of a run; train nothing
  --model tiny --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --train-iters 20 --eval-iters 2
    --lr 1e-3 --micro-batch-size 1 --global-batch-size 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000
                               train a small model for 20 batches on made-up data
"""


class Parser(argparse.ArgumentParser):
    """Raises `argparse.ArgumentError` instead of exiting. Under torchrun, rank 0 alone prints help."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)  # type: ignore[misc]
        except (LookupError, AssertionError) as error:  # of Megatron's converters; argparse expects other kinds
            raise argparse.ArgumentError(action, f"invalid value: {arg_string!r}") from error

    def print_help(self, file: Any = None) -> None:
        if is_first_rank():
            super().print_help(file)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of descriptions and shows defaults, except those that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        shown = default is not None and not isinstance(default, bool) and default != argparse.SUPPRESS
        return super()._get_help_string(action) if shown else action.help

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):  # a bare "%" in a help text of Megatron's
            return str(action.help)


def make_parser(*, texts: bool = True) -> Parser:
    """A parser of every option, with this package's defaults. In its help, Megatron-LM's groups come last.

    Args:
        texts: all help texts; without most of Megatron-LM's it takes a tenth of the time.
    """
    parser = Parser(
        prog="megatron_async.pretrain",
        usage=_USAGE,
        description=_EXAMPLES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add_options(parser)
    own = len(parser._action_groups)
    add_megatron_options(parser, texts=texts)
    everything = len(parser._action_groups)
    options.add_arguments(parser)
    groups = parser._action_groups
    groups[:] = [*groups[:own], *groups[everything:], *groups[own:everything]]
    parser.set_defaults(
        # The layer-wise distributed optimizer keeps every parameter whole at one owner, whatever steps on it.
        use_layer_wise_param_layout=False,
        dist_ckpt_optim_fully_reshardable=True,  # Megatron's other format is bound to the layout that saved it
        log_interval=1,
        eval_interval=1000,  # Megatron has none, and fails without
    )
    return parser


def actions_given(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, str]:
    """First spelling, without dashes, of every option in `argv` -> its destination."""
    tokens = {token.partition("=")[0] for token in argv}
    actions = (action for action in parser._actions if tokens.intersection(action.option_strings))
    return {action.option_strings[0].lstrip("-"): action.dest for action in actions}
