# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Parameter counts of the presets against sums by hand, and Megatron's own count on the meta device."""

import pytest

from megatron_async.models import presets
from megatron_async.models.presets import PRESETS


def by_hand(a: dict) -> dict[str, int]:
    """Parameters by kind, from the shapes of the papers' blocks."""
    h, layers, vocabulary = a["hidden_size"], a["num_layers"], a["vocab_size"]
    heads, groups, size = a["num_attention_heads"], a["num_query_groups"], a["kv_channels"]
    every = a.get("linear_attention_freq")
    full = layers // every if every else layers
    linear = layers - full
    gates = 2 if a.get("attention_output_gate") else 1
    counts = {"embedding": vocabulary * h}
    counts["attention"] = full * (h * (gates * heads + 2 * groups) * size + heads * size * h)
    norms = 2 * layers * h + h + (2 * size * full if a.get("qk_layernorm") else 0)
    if every:
        key = a["linear_num_key_heads"] * a["linear_key_head_dim"]
        value_heads, value = a["linear_num_value_heads"], a["linear_num_value_heads"] * a["linear_value_head_dim"]
        projections = h * (2 * key + 2 * value + 2 * value_heads) + value * h
        convolution = (2 * key + value) * a["linear_conv_kernel_dim"]
        counts["linear_attention"] = linear * (projections + convolution + 2 * value_heads)
        norms += linear * a["linear_value_head_dim"]
    if "num_experts" in a:
        counts["router"] = layers * h * a["num_experts"]
        counts["experts"] = layers * a["num_experts"] * 3 * h * a["moe_ffn_hidden_size"]
        if shared := a.get("moe_shared_expert_intermediate_size"):
            counts["shared_expert"] = layers * (3 * h * shared + h)
    else:
        counts["feed_forward"] = layers * 3 * h * a["ffn_hidden_size"]
    counts["norm"] = norms
    if a["untie_embeddings_and_output_weights"]:
        counts["head"] = vocabulary * h
    return counts


def hybrid_by_hand(a) -> dict[str, int]:
    """As `by_hand`, for a HybridModel with squared ReLU: letters of its pattern."""
    h, pattern, size = a["hidden_size"], a["hybrid_layer_pattern"], a["kv_channels"]
    of = {letter: pattern.count(letter) for letter in "M*-E"}
    inner, mapped = 2 * h, a["mamba_num_groups"] * a["mamba_state_dim"]
    heads = inner // a["mamba_head_dim"]
    mamba = h * (2 * inner + 2 * mapped + heads) + (4 + 1) * (inner + 2 * mapped) + 3 * heads + inner * h
    return {
        "embedding": a["vocab_size"] * h,
        "attention": of["*"] * 2 * h * size * (a["num_attention_heads"] + a["num_query_groups"]),
        "mamba": of["M"] * mamba,
        "feed_forward": of["-"] * 2 * h * a["ffn_hidden_size"],
        "router": of["E"] * h * a["num_experts"],
        "experts": of["E"] * a["num_experts"] * 2 * h * a["moe_ffn_hidden_size"],
        "norm": len(pattern) * h + h + of["M"] * inner,
        "head": a["vocab_size"] * h,
    }


@pytest.fixture(scope="module")
def megatrons_count():
    from megatron_async import platform

    platform.activate("cpu")
    from megatron_async.config import arguments
    from megatron_async.planning import parameters

    def count(name: str, *more: str) -> tuple[dict[str, int], int]:
        args = arguments.parse(["--device", "cpu", "--dry-run", "--model", name, *more])
        counts = parameters.count_by_kind(p for stage in parameters.stages(args) for p in stage.parameters)
        return counts, parameters.active(counts, args.num_experts, args.moe_router_topk)

    return count


@pytest.mark.parametrize("name", PRESETS)
def test_megatrons_count_equals_the_hand_sum(name, megatrons_count):
    counts, active = megatrons_count(name)
    arguments = dict(PRESETS[name].arguments)
    assert counts == (hybrid_by_hand if "hybrid_layer_pattern" in arguments else by_hand)(arguments)
    assert (sum(counts.values()), active) == (PRESETS[name].total, PRESETS[name].active)


def test_published_totals():
    """SmolLM2's model cards; the paper's "about" figures for the two with experts."""
    assert PRESETS["smollm2-135m"].total == 134_515_008
    assert PRESETS["smollm2-360m"].total == 361_821_120
    assert PRESETS["moe-2b"].total == pytest.approx(2e9, rel=0.05)
    assert PRESETS["moe-2b"].active == pytest.approx(0.5e9, rel=0.05)
    assert PRESETS["moe-10b-hybrid"].total == pytest.approx(10e9, rel=0.05)
    assert PRESETS["moe-10b-hybrid"].active == pytest.approx(0.65e9, rel=0.01)


@pytest.mark.parametrize(
    "split",
    [
        "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8",
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
    ],
)
def test_the_split_does_not_change_the_count(split, megatrons_count):
    name = "moe-10b-hybrid-mini"
    assert megatrons_count(name, *split.split()) == megatrons_count(name)


def test_tied_embeddings_count_once_on_a_pipeline(megatrons_count):
    split = megatrons_count("smollm2-135m-mini", "--pipeline-model-parallel-size", "3")
    assert split == megatrons_count("smollm2-135m-mini")


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.miniature_of])
def test_a_miniature_has_the_same_kinds_of_everything(name):
    """Same arguments but for sizes: layers, widths, heads, experts, context, vocabulary, initial spread."""
    small, large = PRESETS[name].arguments, PRESETS[PRESETS[name].miniature_of].arguments
    sizes = {
        "num_layers hidden_size ffn_hidden_size seq_length max_position_embeddings vocab_size kv_channels",
        "num_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size",
        "linear_num_key_heads linear_key_head_dim linear_num_value_heads linear_value_head_dim",
    }
    ignored = {word for line in sizes for word in line.split()}
    assert small.keys() == large.keys()
    assert {k: v for k, v in small.items() if k not in ignored} == {k: v for k, v in large.items() if k not in ignored}
    assert PRESETS[name].total < 10_000_000


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"no such preset.*moe-10b-hybrid.*smollm2-360m"):
        presets.arguments("smollm3")


def test_presets_set_arguments_that_exist(megatrons_count):
    from megatron_async.config.parser import make_parser

    known = {action.dest for action in make_parser()._actions}
    for name, preset in PRESETS.items():
        assert preset.arguments.keys() <= known, name
