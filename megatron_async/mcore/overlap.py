# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Data-parallel communication beside the compute of Megatron's own schedules, as Megatron's step loop sets it up."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.utils import get_model_config


def set_up(args: argparse.Namespace, model: Sequence[Any]) -> None:
    """`--overlap-grad-reduce`: reductions of gradients start in the backwards of a batch's last micro-batch.

    Of `--overlap-param-gather` it removes the hooks that wrapped models begin with, see `gathers_in_forwards`.
    """
    if args.overlap_grad_reduce:
        config = get_model_config(model[0])
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if args.align_grad_reduce:
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in model])
    if args.overlap_param_gather:
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=False)


@contextlib.contextmanager
def gathers_in_forwards(args: argparse.Namespace, model: Sequence[Any]) -> Iterator[None]:
    """`--overlap-param-gather`: in the block, forwards gather the weights of their layers; after it all are there.

    Collective. After an error nothing is gathered.
    """
    if not args.overlap_param_gather:
        yield
        return
    config = get_model_config(model[0])
    if args.align_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])
    for chunk in model:
        chunk.enable_forward_pre_hook()
    yield
    for chunk in model:
        chunk.disable_forward_pre_hook()
    config.param_sync_func = None


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    """What Megatron's schedules want: a function, or with several model chunks a list of them."""
    return functions if len(functions) > 1 else functions[0]
