# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron's own training loop, for the worker pool."""

import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from tests.distributed.jobs import BASE, Outcome, weights_of


@contextlib.contextmanager
def _may_start_processes() -> Iterator[None]:
    """Megatron writes checkpoints in processes of its own, which the pool's workers, being daemons, may not start."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings["daemon"] = False
    # Megatron would start this process with `spawn`, which imports everything again.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    try:
        yield
    finally:
        settings["daemon"] = True
        filesystem_async._results_queue._manager.shutdown()
        filesystem_async._results_queue = None


def train(arguments: Sequence[str]) -> Outcome:
    """Train a GPTModel with Megatron's set-up, loop, saves and loads on the base arguments; losses, final weights."""
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config
    from megatron.training import training

    from megatron_async.config import arguments as command_line
    from megatron_async.data.datasets import train_valid_test_datasets
    from megatron_async.mcore.parallel import initialize
    from megatron_async.mcore.training import (
        get_tokenizer,
        pretrain_cfg_container_from_args,
        set_global_variables,
        update_train_iters,
    )
    from megatron_async.models import gpt
    from megatron_async.training import run

    args = command_line.parse([*BASE, "--model-class", "gpt", *arguments])
    args.rerun_mode, args.create_attention_mask_in_dataloader = "disabled", False
    set_global_variables(args)
    initialize(args)
    update_train_iters(args)
    vocabulary = int(get_tokenizer().vocab_size)
    model, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=pretrain_cfg_container_from_args(args, gpt.model_config(args, vocabulary)),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    provider = partial(train_valid_test_datasets, args, tokenizer=get_tokenizer(), vp_stage=None)
    provider.is_distributed = True  # type: ignore[attr-defined]
    train_data, valid_data, _ = training.build_train_valid_test_data_iterators(provider)
    outcome = Outcome()
    step = training.train_step

    def noting(*given: Any, **options: Any) -> Any:
        result = step(*given, **options)
        outcome.losses.extend(float(value) for value in result[0].values())
        return result

    training.train_step = noting
    try:
        with _may_start_processes():
            forward, config = gpt.ForwardStep(args, vocabulary), get_model_config(model[0])
            training.train(forward, model, optimizer, scheduler, train_data, valid_data, None, config, {}, None)
    finally:
        training.train_step = step
    outcome.weights = weights_of(model)
    run.close()
    return outcome


def convert(words: Sequence[str]) -> int:
    """Exit status of `megatron-async convert`."""
    from megatron_async.cli import convert as command

    with _may_start_processes():
        return command.main(list(words))
