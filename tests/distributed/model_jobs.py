# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs for the worker pool that train presets."""

import multiprocessing
from collections.abc import Sequence

from tests.distributed.jobs import Outcome, changed_data, observer, weights_of, whole_corpus

RUN = (
    "--device cpu --seq-length 24 --max-position-embeddings 24 --micro-batch-size 1 --global-batch-size 4 "
    # Adam divides by small gradients, whose rounding differs between processors and layouts.
    "--train-iters 3 --optimizer adam --adam-eps 1e-4 --lr 0.002 --lr-decay-style constant --weight-decay 0.1 "
    "--clip-grad 1.0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 61 --make-vocab-size-divisible-by 8 "
    "--eval-interval 1000 --eval-iters 0 --num-workers 0 --seed 7"
).split()


def train(arguments: Sequence[str]) -> Outcome:
    """Train what `--model` among the arguments names."""
    from megatron_async.config import arguments as command_line
    from megatron_async.training import run

    outcome = Outcome()
    with whole_corpus():
        loop = run.build(command_line.parse([*RUN, *arguments]), callbacks=[observer(outcome)])
    loop.run()
    outcome.weights = weights_of(loop.model)
    run.close()
    return outcome


def first_losses(arguments: Sequence[str]) -> list[float]:
    """Losses of a run, empty on ranks without the loss. Saving needs a helper process, which a daemon may not start."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return train(arguments).losses


def train_on_other_tokens(arguments: Sequence[str], shift: int) -> Outcome:
    """Train on data whose token ids are larger than the tokenizer's by `shift`."""
    from tests.distributed import jobs

    with changed_data(lambda data: ({**sample, "tokens": sample["tokens"] + shift} for sample in data)):
        return jobs.train(arguments)
