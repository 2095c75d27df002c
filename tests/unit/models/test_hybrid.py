# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Patterns of a HybridModel: what is refused, with its position, and how stages are cut."""

import pytest

from megatron_async.config import arguments

BASE = (
    "--device cpu --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 0.01 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 --normalization RMSNorm --disable-bias-linear --mamba-head-dim 16 --mamba-num-groups 2"
).split()
EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "16")


@pytest.fixture
def parse(monkeypatch):
    def parse(pattern: str, *more: str, ranks: int = 1):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return arguments.parse([*BASE, "--hybrid-layer-pattern", pattern, *more])

    return parse


PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize(
    ("pattern", "more", "ranks", "message"),
    [
        ("M-x*", (), 1, "'x' at position 2 is not a layer"),
        ("M-D*", (), 1, "'D' at position 2 is not a layer"),
        ("M*/MM", (), 1, "'/' at position 2 is not a layer"),
        ("M-||*-|M", (*PP2, "--pipeline-schedule", "wpipe", "--untie-embeddings-and-output-weights"), 2, "stage 1"),
        ("M-|*-|M-", (*PP2, "--pipeline-schedule", "2bw"), 2, r"has 3 stage\(s\).* = 2\."),
        ("M-|*-", (), 1, r"has 2 stage\(s\).* = 1\."),
        ("M-*", (*PP2, "--pipeline-schedule", "2bw"), 2, "cannot be split evenly"),
        ("M-*E", (), 1, "E at position 3 needs --num-experts"),
        ("M-*-", EXPERTS, 1, "has no E"),
        ("M-*-", ("--mamba-num-groups", "3"), 1, "4 Mamba heads cannot be divided among --mamba-num-groups 3"),
        ("M-*-", ("--reset-attention-mask",), 1, "carry their state"),
        ("M-*-", ("--mtp-num-layers", "1", *PP2, "--pipeline-schedule", "2bw"), 2, "mtp-num-layers"),
    ],
)
def test_refused(parse, pattern, more, ranks, message):
    with pytest.raises(arguments.ArgumentProblems, match=message):
        parse(pattern, *more, ranks=ranks)


def test_stages_are_cut_evenly_unless_they_are_given(parse):
    wpipe = (*PP2, "--pipeline-schedule", "wpipe", "--untie-embeddings-and-output-weights")
    assert parse("M-*E-M*-", *EXPERTS, *wpipe, ranks=2).hybrid_layer_pattern == "M-|*E|-M|*-"
    args = parse("M-*|E", *EXPERTS, *PP2, "--pipeline-schedule", "2bw", ranks=2)
    assert (args.hybrid_layer_pattern, args.num_layers) == ("M-*|E", 4)
    assert parse("M-*-").hybrid_layer_pattern == "M-*-"
