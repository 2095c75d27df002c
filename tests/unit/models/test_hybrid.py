# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Patterns of a HybridModel: what is refused, with its position, how stages are cut, and the pattern of a GPT."""

import pytest

from megatron_async.config import arguments
from megatron_async.models import hybrid as hybrid_models

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
WPIPE = (*PP2, "--pipeline-schedule", "wpipe", "--untie-embeddings-and-output-weights")


@pytest.mark.parametrize(
    ("pattern", "more", "ranks", "message"),
    [
        ("M-x*", (), 1, "'x' at position 2 is not a layer"),
        ("M-D*", (), 1, "'D' at position 2 is not a layer"),
        ("M*/MM", (), 1, "'/' at position 2 is not a layer"),
        ("M-||*-|M", WPIPE, 2, "stage 1"),
        ("M-|*-|M-", (*PP2, "--pipeline-schedule", "2bw"), 2, r"has 3 stage\(s\), ends at positions \[2, 5\].* = 2\."),
        ("M-|*-|M-", WPIPE, 2, r"has 3 stage\(s\), ends at positions \[2, 5\].*wpipe needs 2 for each.* = 4\."),
        ("M-|*-", (), 1, r"has 2 stage\(s\), ends at positions \[2\].* = 1\."),
        ("M-*", (*PP2, "--pipeline-schedule", "2bw"), 2, "cannot be split evenly"),
        ("M-*-", ("--multi-latent-attention",), 1, r"with --multi-latent-attention: \* is attention .* Write \+"),
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
    assert parse("M-*E-M*-", *EXPERTS, *WPIPE, ranks=2).hybrid_layer_pattern == "M-|*E|-M|*-"
    args = parse("M-*|E", *EXPERTS, *PP2, "--pipeline-schedule", "2bw", ranks=2)
    assert (args.hybrid_layer_pattern, args.num_layers) == ("M-*|E", 4)
    assert parse("M-*-").hybrid_layer_pattern == "M-*-"


def test_older_words_of_megatrons_scripts(parse, monkeypatch):
    """--hybrid-override-pattern is the pattern; --spec of Megatron's own stack and --is-hybrid-model repeat it."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    spec = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --is-hybrid-model".split()
    args = arguments.parse([*BASE, "--hybrid-override-pattern", "M-*-", *spec])
    new = parse("M-*-")
    assert args.hybrid_layer_pattern == new.hybrid_layer_pattern == "M-*-"
    assert [notice.split()[0] for notice in args._notices] == [
        "--hybrid-override-pattern",
        "--is-hybrid-model",
        "--spec",
    ]
    same = {**vars(args), "_notices": [], "_resolved": None}
    assert same == {**vars(new), "_notices": [], "_resolved": None}
    for words, message in {
        ("--hybrid-override-pattern", "M-"): "cannot both be specified",
        ("--spec", "mine", "layers"): "--spec mine layers: initial weights",
    }.items():
        with pytest.raises(arguments.ArgumentProblems, match=message):
            parse("M-*-", *words)
    with pytest.raises(arguments.ArgumentProblems, match="--is-hybrid-model: an older way"):
        arguments.parse([*BASE, "--num-layers", "4", "--is-hybrid-model"])


GPT = [*BASE, "--num-layers", "4"]


@pytest.fixture
def parse_gpt(monkeypatch):
    def parse(words: str, ranks: int = 1):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return arguments.parse([*GPT, *words.split()])

    return parse


@pytest.mark.parametrize("flag", hybrid_models.BEYOND_HYBRID)
def test_what_hybrid_model_lacks_is_built_as_gpt(parse_gpt, flag):
    values = {"no_rope_freq": " 2", "window_attn_skip_freq": " 2 --window-size 4,0"}
    words = f"--{flag.replace('_', '-')}{values.get(flag, '')} --position-embedding-type rope"
    assert parse_gpt("").model_class == "hybrid"
    assert parse_gpt(words).model_class == "gpt"
    with pytest.raises(arguments.ArgumentProblems, match=f"--{flag.replace('_', '-')}: only GPTModel has it"):
        parse_gpt(f"{words} --model-class hybrid")


@pytest.mark.parametrize(
    ("words", "ranks", "pattern"),
    [
        ("", 1, "*-*-*-*-"),
        ("--num-experts 4 --moe-ffn-hidden-size 16 --moe-layer-freq [0,1,0,1]", 1, "*-*E*-*E"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3", 2, "*-*-*-|*-"),
        ("--pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split --num-layers 3", 2, "*-*-|*-"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|t*4L", 2, "|*-*-*-*-"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2, "*-|*-|*-|*-"),
        ("--multi-latent-attention --position-embedding-type rope", 1, "+-+-+-+-"),
        (
            "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
            "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8",
            1,
            "G-*-G-*-",
        ),
    ],
)
def test_the_pattern_of_a_gpt_has_its_layers_on_their_stages(parse_gpt, words, ranks, pattern):
    args = parse_gpt(words, ranks)
    args.vocab_size = 64
    config = hybrid_models.model_config(args)
    assert (config.hybrid_layer_pattern, config.transformer.num_layers) == (pattern, 2 * args.num_layers)
    assert args.hybrid_layer_pattern is None, "the arguments stay those of a GPT"
