# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is padded differently on every layout trains the same, and its checkpoints fit all of them."""

import numpy as np
import pytest

from benchmarks.processes import JobFailed, Pool
from tests.distributed.jobs import Outcome
from tests.distributed.test_parity import ATOL, RTOL

VOCABULARY = 7  # 8 rows on one tensor-parallel rank, 16 on two, of which the second rank has none that counts
RECIPE = f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --num-layers 2 --optimizer adam --train-iters 4"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"


def train(pool: Pool, arguments: str, ranks: int) -> list[Outcome]:
    return pool.run("tests.distributed.jobs:train", f"{RECIPE} {arguments}".split(), ranks=ranks)


@pytest.mark.parametrize("tied", ["", "--untie-embeddings-and-output-weights"])
def test_loss_and_gradient_do_not_depend_on_the_padding(pool, tied):
    (expected,) = train(pool, tied, 1)
    name = "embedding.word_embeddings.weight" if not tied else "output_layer.weight"
    assert expected.weights[name].shape[0] == 8
    parts = train(pool, f"{tied} {TP2}", 2)
    for outcome in parts:
        np.testing.assert_allclose(outcome.losses, expected.losses, rtol=RTOL, atol=ATOL)
        np.testing.assert_allclose(outcome.grad_norms, expected.grad_norms, rtol=RTOL, atol=ATOL)
        assert outcome.weights[name].shape[0] == 8
    table = np.concatenate([outcome.weights[name] for outcome in parts])
    np.testing.assert_allclose(table[:VOCABULARY], expected.weights[name][:VOCABULARY], rtol=RTOL, atol=10 * ATOL)
    assert not table[VOCABULARY:].any() and not expected.weights[name][VOCABULARY:].any()


def test_a_checkpoint_goes_to_another_padding(pool, tmp_path):
    (whole,) = train(pool, f"--save {tmp_path} --save-interval 2", 1)
    for outcome in train(pool, f"{TP2} --load {tmp_path} --ckpt-step 2", 2):
        np.testing.assert_allclose(outcome.losses, whole.losses[2:], rtol=RTOL, atol=ATOL)


def test_data_of_another_tokenizer_end_the_run(pool):
    with pytest.raises(JobFailed, match=r"token id \d+ \(in tokens\), but the tokenizer has 7 tokens, 0 to 6"):
        pool.run("tests.distributed.model_jobs:train_on_other_tokens", RECIPE.split(), VOCABULARY, ranks=1)
