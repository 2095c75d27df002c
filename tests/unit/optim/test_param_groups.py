# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Roles of parameters, who steps on them, and the hyper-parameters of the command line."""

import io
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from megatron_async.optim import listing, options, ownership, param_groups
from megatron_async.optim.ownership import Owned, table
from megatron_async.optim.param_groups import KINDS, ROLES, Assignment, classify, parse_overrides, role_of
from megatron_async.optim.registry import find, names, specs

# Megatron's names in a hybrid mixture of experts, with shapes.
NAMES = {
    "embedding.word_embeddings.weight": ((64, 8), "embedding", "embedding"),
    "embedding.position_embeddings.weight": ((64, 8), "embedding", "embedding"),
    "decoder.layers.0.input_layernorm.weight": ((8,), "norm", "norm"),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": ((8,), "norm", "norm"),
    "decoder.layers.0.self_attention.linear_qkv.weight": ((24, 8), "qkv", "attention"),
    "decoder.layers.0.self_attention.linear_qkv.bias": ((24,), "bias", "attention"),
    "decoder.layers.0.self_attention.q_layernorm.weight": ((4,), "norm", "norm"),
    "decoder.layers.0.self_attention.linear_proj.weight": ((8, 8), "matrix", "attention"),
    "decoder.layers.0.mlp.linear_fc1.weight": ((32, 8), "matrix", "feed_forward"),
    "decoder.layers.0.mlp.router.weight": ((4, 8), "router", "router"),
    "decoder.layers.0.mlp.router.bias": ((4,), "router", "router"),
    "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight": ((32, 8), "expert", "experts"),
    "decoder.layers.0.mlp.experts.linear_fc2.weight7": ((8, 16), "expert", "experts"),
    "decoder.layers.0.mlp.experts.linear_fc1.weight": ((4, 32, 8), "expert", "experts"),
    "decoder.layers.0.mlp.experts.linear_fc1.bias0": ((32,), "bias", "experts"),
    "decoder.layers.0.mlp.shared_experts.linear_fc1.weight": ((32, 8), "matrix", "shared_expert"),
    "decoder.layers.0.mlp.shared_experts.gate_weight": ((1, 8), "router", "shared_expert"),
    "decoder.layers.1.self_attention.in_proj.weight": ((60, 8), "delta-in", "linear_attention"),
    "decoder.layers.1.self_attention.in_proj.layer_norm_weight": ((8,), "norm", "norm"),
    "decoder.layers.1.self_attention.out_proj.weight": ((8, 16), "delta-out", "linear_attention"),
    "decoder.layers.1.self_attention.out_norm.weight": ((4,), "norm", "norm"),
    "decoder.layers.1.self_attention.conv1d.weight": ((32, 1, 4), "convolution", "linear_attention"),
    "decoder.layers.1.self_attention.conv1d.bias": ((32,), "convolution", "linear_attention"),
    "decoder.layers.1.self_attention.A_log": ((4,), "decay", "linear_attention"),
    "decoder.layers.1.self_attention.dt_bias": ((4,), "decay", "linear_attention"),
    "decoder.final_layernorm.weight": ((8,), "norm", "norm"),
    "output_layer.weight": ((64, 8), "head", "head"),
    "decoder.layers.0.something.weight": ((8,), "other", "other"),
    "decoder.layers.0.mlp.linear_fc1.bias": ((32,), "bias", "feed_forward"),
    "decoder.layers.0.mlp.shared_experts.linear_fc2.bias": ((8,), "bias", "shared_expert"),
    "decoder.layers.1.self_attention.out_proj.bias": ((8,), "bias", "linear_attention"),
}


@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
@pytest.mark.parametrize("name", NAMES)
def test_roles_and_kinds_of_megatrons_names(name: str, prefix: str) -> None:
    shape, role, kind = NAMES[name]
    assert classify(prefix + name, torch.empty(shape)) == (role, kind)
    assert kind in KINDS and role in ROLES


def test_the_copy_of_a_tied_embedding_is_an_embedding() -> None:
    param = torch.empty(64, 8)
    param.shared_embedding = True  # type: ignore[attr-defined]
    assert role_of("output_layer.weight", param) == "embedding"


def test_matrix_optimizers_leave_the_rest_to_another() -> None:
    chosen = Assignment("normuon", "lion", {"qkv": "adam"})
    assert chosen["matrix"] == chosen["expert"] == chosen["delta-in"] == chosen["delta-out"] == "normuon"
    assert chosen["qkv"] == "adam"
    rest = ("embedding", "head", "router", "norm", "bias", "convolution", "decay", "other")
    assert {chosen[role] for role in rest} == {"lion"}
    assert chosen.used() == ["normuon", "adam", "lion"]


@pytest.mark.parametrize("name", [spec.name for spec in specs() if spec.scope != "matrix"])
def test_elementwise_optimizers_take_everything(name: str) -> None:
    assert Assignment(name, "adam", {}).used() == [name]


def test_overrides_are_all_checked() -> None:
    overrides, problems = parse_overrides(["head=lion", "neck=adam", "router=muon", "qkv", "head=adam", "matrix=soap"])
    assert overrides == {"head": "lion", "matrix": "soap"}
    assert len(problems) == 4
    assert "neck=adam" in problems[0] and "Roles: embedding, head" in problems[0] and "mars-m" in problems[0]
    assert "muon steps on matrices only (expert, qkv" in problems[1]
    assert "head went to lion already" in problems[3]


def config(**values: object) -> SimpleNamespace:
    return SimpleNamespace(num_attention_heads=8, num_query_groups=2, kv_channels=4, **values)


def test_rows_of_fused_weights() -> None:
    module, fused_rows = torch.nn.Module(), param_groups.fused_rows
    assert fused_rows("qkv", module, config()) == (16, 4, 4)
    assert fused_rows("qkv", module, config(attention_output_gate=True)) == (16, 16, 4, 4)
    assert fused_rows("matrix", module, config()) == ()
    with pytest.raises(ValueError, match="--optimizer-for delta-in=adam"):
        fused_rows("delta-in", module, config())
    module.in_proj_split_sections = (8, 8, 16, 16, 4, 4)  # type: ignore[assignment]
    assert fused_rows("delta-in", module, config()) == (8, 8, 16, 16, 4, 4)


def owned(name: str, role: str, optimizer: str = "adam", owners: int = 1, elements: int = 10) -> Owned:
    return Owned(name, role, optimizer, elements, owners, 0.1, 0.0)


def test_ownership_on_every_stage() -> None:
    chosen = Assignment("muon", "adam", {})
    first = [owned("a", "matrix", "muon"), owned("tied", "embedding")]
    second = [owned("b", "matrix", "muon"), owned("tied", "embedding")]
    assert ownership.check([first, second], chosen) == []
    assert ownership.check([[*first, owned("c", "norm", owners=0)], second], chosen) == ["no optimizer steps on c"]
    assert (
        "rank 1: 2 optimizers step on b"
        in ownership.check([first, [owned("b", "matrix", "muon", owners=2)]], chosen)[0]
    )
    # Dealt out to data-parallel ranks: one owner among them is enough.
    assert ownership.check([[owned("a", "matrix", "muon", owners=0)], [owned("a", "matrix", "muon")]], chosen) == []


def test_assignments_that_match_nothing() -> None:
    (problem,) = ownership.check([[owned("a", "matrix", "muon")]], Assignment("muon", "adam", {"router": "lion"}))
    assert problem == "--optimizer-for router=lion: the model has no parameter of that role. It has: matrix"
    (problem,) = ownership.check([[owned("a", "norm")]], Assignment("muon", "adam", {}))
    assert problem.startswith("--optimizer muon: the model has no parameter for it. It steps on: expert, qkv, ")


def test_the_table_counts_every_parameter_once() -> None:
    ranks = [
        [owned("a", "matrix", "muon", elements=6), owned("tied", "embedding"), owned("n", "norm")],
        [owned("a", "matrix", "muon", elements=6, owners=0), owned("b", "matrix", "muon"), owned("tied", "embedding")],
    ]
    role, count, elements = (list(column.cells) for column in table(ranks).columns[:3])
    assert list(zip(role, count, elements, strict=True)) == [
        ("embedding", "1", "10"),
        ("norm", "1", "10"),
        ("matrix", "2", "16"),
    ]


# The command line


def test_flags_of_all_hyperparameters() -> None:
    flags = [option.flag for option in options.all_options()]
    assert len(flags) == len(set(flags))
    expected = {
        "--normuon-beta2", "--adan-beta3", "--mars-1d-beta2", "--mars-m-gamma", "--soap-shampoo-beta", "--lion-beta1",
        "--adam-eps", "--muon-num-ns-steps", "--sgd-momentum", "--nadam-momentum-decay", "--signum-momentum",
    }  # fmt: skip
    assert expected <= set(flags)
    assert len(flags) == sum(
        len(own.default) if isinstance(own.default, tuple) else 1
        for spec in specs()
        for own in fields(spec.hyperparameters)
        if own.name not in ("lr", "weight_decay")
    )


def test_weight_decays_of_the_paper() -> None:
    assert [find(name).hyperparameters().weight_decay for name in ("lion", "muon")] == [0.5, 0.1]


def test_the_list_names_every_optimizer_and_option() -> None:
    text = io.StringIO()
    listing.print_list(Console(file=text, width=240))
    for name in names():
        assert f"│ {name} " in text.getvalue()
    for option in options.all_options():
        assert option.flag in text.getvalue()
    assert all(line.strip() in text.getvalue() for line in find("adam").text)
