# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""QK-clip against its rule on separate matrices, and what it does to real logits."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_async.optim import qk_clip, rules
from megatron_async.optim.qk_clip import ClipRule, QkClip, head_factors, row_factors
from megatron_async.optim.step import MasterStep, StepContext, parts

HEAD, HIDDEN = 4, 12


def config(heads: int, groups: int, gate: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        num_attention_heads=heads, num_query_groups=groups, kv_channels=HEAD, attention_output_gate=gate
    )


RULE = ClipRule(threshold=100.0, alpha=0.3)


def test_the_numbers_of_the_documentation() -> None:
    """Threshold 100, shared evenly; a group of heads with maxima 400 and 120, one of 50 and 100."""
    queries, keys = head_factors(torch.tensor([[400.0, 120.0], [50.0, 100.0]]), ClipRule(100.0, 0.5))
    torch.testing.assert_close(keys, torch.tensor([0.5, 1.0]), rtol=1e-6, atol=0)
    torch.testing.assert_close(queries, torch.tensor([[0.5, 1.0], [1.0, 1.0]]), rtol=1e-6, atol=0)


def test_a_head_with_keys_of_its_own_is_muonclips() -> None:
    maxima = torch.tensor([[250.0], [90.0], [1e4]])
    queries, keys = head_factors(maxima, RULE)
    eta = [min(1.0, 100.0 / value) for value in (250.0, 90.0, 1e4)]
    torch.testing.assert_close(queries[:, 0], torch.tensor([e**0.3 for e in eta]), rtol=1e-6, atol=0)
    torch.testing.assert_close(keys, torch.tensor([e**0.7 for e in eta]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [100.0, -3.0, -math.inf, math.inf, math.nan])
def test_what_is_not_above_the_threshold_keeps_its_bits(value: float) -> None:
    queries, keys = head_factors(torch.tensor([[value, 1.0]]), RULE)
    assert torch.equal(queries, torch.ones(1, 2)) and torch.equal(keys, torch.ones(1))


@pytest.mark.parametrize("gate", [False, True], ids=["no gate", "gate"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 2), (3, 1)])
def test_a_fused_projection_is_its_separate_matrices(heads: int, groups: int, gate: bool) -> None:
    """The rule head by head in plain Python on Q, K, V (and gate), which are then fused as Megatron does."""
    shared = heads // groups
    maxima = torch.rand(heads) * 300
    query, gates, key, value = (torch.randn(count, HEAD, HIDDEN) for count in (heads, heads, groups, groups))

    def fused(query: Tensor, key: Tensor) -> Tensor:
        rows = []
        for group in range(groups):
            own = slice(group * shared, (group + 1) * shared)
            rows += [query[own].reshape(-1, HIDDEN), *([gates[own].reshape(-1, HIDDEN)] if gate else [])]
            rows += [key[group], value[group]]
        return torch.cat(rows)

    clipped_query, clipped_key = query.clone(), key.clone()
    for group in range(groups):
        own = range(group * shared, (group + 1) * shared)
        smallest = min(min(1.0, 100.0 / maxima[head].item()) for head in own)
        clipped_key[group] *= smallest ** (1 - 0.3)
        for head in own:
            clipped_query[head] *= min(1.0, min(1.0, 100.0 / maxima[head].item()) / smallest ** (1 - 0.3))
    both = torch.stack([maxima, torch.zeros(heads)])
    factors = row_factors(both, groups, config(heads, groups, gate), RULE)["linear_qkv"]
    assert torch.equal(factors[1], torch.ones(groups * (shared * (2 if gate else 1) + 2) * HEAD))
    torch.testing.assert_close(
        fused(query, key) * factors[0][:, None], fused(clipped_query, clipped_key), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("rank", "name"), [(None, "linear_q_proj"), (6, "linear_q_up_proj")])
def test_latent_attention_head_by_head(rank: int | None, name: str) -> None:
    """Logits of a head above the threshold come down to it; shared rotary keys and values stay."""
    heads, plain, rotary, value, latent, tokens = 3, 4, 2, 5, 6, 7
    rule = ClipRule(threshold=20.0, alpha=0.3)
    query = torch.randn(heads, plain + rotary, latent) * torch.tensor([30.0, 0.01, 9.0]).view(-1, 1, 1)
    key_value, shared = torch.randn(heads, plain + value, latent), torch.randn(tokens, rotary)
    x = torch.randn(tokens, latent)

    def logits(query: Tensor, key_value: Tensor) -> Tensor:
        keys = torch.cat([x @ key_value[:, :plain].mT, shared.expand(heads, -1, -1)], dim=-1)
        return ((x @ query.mT) @ keys.mT).amax(dim=(1, 2))

    before = logits(query, key_value)
    sizes = {"qk_head_dim": plain, "qk_pos_emb_head_dim": rotary, "v_head_dim": value, "q_lora_rank": rank}
    factors = row_factors(before[None], heads, SimpleNamespace(multi_latent_attention=True, **sizes), rule)
    of_queries, of_keys = factors[name], factors["linear_kv_up_proj"]
    of_queries, of_keys = of_queries.view(heads, -1, 1), of_keys.view(heads, -1, 1)
    after = logits(query * of_queries, key_value * of_keys)
    torch.testing.assert_close(after, before.clamp(max=20.0), rtol=1e-5, atol=0)
    eta = 20.0 / before[0].item()
    assert before[0] > 20 > before[1]
    assert of_queries[0, 0].item() == pytest.approx(eta**0.3) and of_queries[0, -1].item() == pytest.approx(eta)
    assert of_keys[0, 0].item() == pytest.approx(eta**0.7)
    assert torch.equal(of_keys[:, plain:], torch.ones(heads, value, 1))
    assert torch.equal(of_queries[1], torch.ones(plain + rotary, 1))


def largest_logits(weight: Tensor, x: Tensor, groups: int, shared: int) -> Tensor:
    """Of plain causal attention with a fused projection, for each head."""
    query, key, _ = (weight @ x.T).view(groups, -1, x.size(0)).split([shared * HEAD, HEAD, HEAD], dim=1)
    query = query.view(groups, shared, HEAD, -1)
    logits = torch.einsum("ghdq,gdk->ghqk", query, key) / HEAD**0.5
    mask = torch.ones(x.size(0), x.size(0)).triu(1).bool()
    return logits.masked_fill(mask, -torch.inf).amax(dim=(-2, -1))


@pytest.mark.parametrize("shared", [1, 3])
def test_logits_above_the_threshold_come_down_to_it(shared: int) -> None:
    groups, rule = 2, ClipRule(threshold=20.0, alpha=0.5)
    weight, x = torch.randn(groups * (shared + 2) * HEAD, HIDDEN), torch.randn(16, HIDDEN)
    weight[: (shared + 2) * HEAD] *= 3  # the first group is far above, the second below
    weight[(shared + 2) * HEAD :] *= 0.25
    before = largest_logits(weight, x, groups, shared)
    assert (before[0] > 20).any() and (before[1] < 20).all()
    factors = row_factors(before.view(1, -1), groups, config(groups * shared, groups), rule)["linear_qkv"]
    after = largest_logits(weight * factors[0][:, None], x, groups, shared)
    assert after[0].max().item() == pytest.approx(20.0, rel=1e-5)
    assert (after[0] <= 20.001).all() and (after[0] <= before[0]).all()
    assert torch.equal(after[1], before[1])


class Model:
    """Two attentions with biases, whose projections a torch optimizer steps on; Megatron is not needed for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = 2 * (2 + 2) * HEAD
        self.layers = [
            SimpleNamespace(
                linear_qkv=SimpleNamespace(weight=Parameter(torch.randn(rows, 6)), bias=Parameter(torch.randn(rows))),
                num_query_groups_per_partition=2,
                config=config(4, 2),
            )
            for _ in range(2)
        ]
        self.other = Parameter(torch.randn(5, 5))
        self.params = [param for layer in self.layers for param in vars(layer.linear_qkv).values()] + [self.other]
        self.parts: list[tuple[Tensor, Parameter, int]] = []
        monkeypatch.setattr(qk_clip, "softmax_attentions", lambda chunks: self.layers)
        monkeypatch.setattr(qk_clip, "flat_parts", lambda optimizer: self.parts)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(monkeypatch)


MAXIMA = torch.tensor([[150.0, 300.0, 10.0, 20.0], [1.0, 2.0, 3.0, 500.0]])


def factors_of(layer: int) -> Tensor:
    return row_factors(MAXIMA, 2, config(4, 2), RULE)["linear_qkv"][layer]


def step_and_clip(params: list[Any], maxima: Tensor | None = MAXIMA) -> None:
    optimizer: Any = torch.optim.SGD(params, lr=1.0)
    MasterStep([optimizer], parts(qk_clip=QkClip([], optimizer, RULE)))(StepContext(0, logits=maxima))


def test_a_step_ends_with_the_clip(model: Model) -> None:
    expected = []
    for position, param in enumerate(model.params):
        param.grad = torch.randn_like(param)
        stepped = (param - param.grad).detach()
        layer = position // 2
        expected.append(stepped if layer == 2 else stepped * factors_of(layer).view(-1, *[1] * (param.ndim - 1)))
    step_and_clip(model.params)
    assert all(torch.equal(param, right) for param, right in zip(model.params, expected, strict=True))
    assert not torch.equal(factors_of(0), torch.ones_like(factors_of(0)))


def test_nothing_is_clipped_without_logits_or_without_a_gradient(model: Model) -> None:
    before = [param.detach().clone() for param in model.params]
    step_and_clip(model.params)  # no gradients: an update that is skipped
    for param in model.params:
        param.grad = torch.zeros_like(param)
    step_and_clip(model.params, maxima=None)
    assert all(torch.equal(param, right) for param, right in zip(model.params, before, strict=True))


@pytest.mark.parametrize("bounds", [(0, 192), (0, 50), (7, 100), (50, 51), (100, 192)])
def test_flat_parts_of_a_projection_get_their_own_factors(model: Model, bounds: tuple[int, int]) -> None:
    """A distributed optimizer steps on ranges of elements that begin and end anywhere in a row."""
    start, stop = bounds
    weight = model.layers[1].linear_qkv.weight
    part = weight.detach().view(-1)[start:stop].clone()
    part.grad = torch.zeros_like(part)
    model.parts = [(part, weight, start)]
    step_and_clip([part])
    assert torch.equal(part, (weight * factors_of(1)[:, None]).detach().view(-1)[start:stop])


def options(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "qk_clip": True,
        "qk_clip_alpha": 0.5,
        "qk_clip_threshold": 100.0,
        "log_max_attention_logit": False,
        "transformer_impl": "local",
        "masked_softmax_fusion": False,
        "bf16": False,
        "fp16": False,
        "experimental_attention_variant": None,
        "linear_attention_freq": None,
        "qk_layernorm": False,
        "qk_l2_norm": False,
        "multi_latent_attention": False,
        "group_query_attention": True,
        "num_query_groups": 2,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": 1,
    }
    return SimpleNamespace(**(values | changes))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"qk_clip_alpha": 1.0}, "--qk-clip-alpha 1.0: must be between 0 and 1"),
    ({"qk_clip_threshold": 0.0}, "--qk-clip-threshold 0.0: must be above 0"),
    ({"qk_layernorm": True}, "--qk-layernorm: queries and keys are normalized"),
    ({"qk_l2_norm": True}, "--qk-l2-norm: queries and keys are normalized"),
    ({"tensor_model_parallel_size": 4}, "--tensor-model-parallel-size 4 and 2 key/value groups"),
    ({"masked_softmax_fusion": True, "bf16": True}, "add --no-masked-softmax-fusion"),
    (
        {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 1]},
        "linear attention in every layer",
    ),
]


@pytest.mark.parametrize(
    ("changes", "text"), REFUSED, ids=lambda value: "" if isinstance(value, str) else str([*value])
)
def test_what_is_refused(changes: dict[str, Any], text: str) -> None:
    (problem,) = rules.qk_clip_problems(options(**changes), frozenset())  # type: ignore[arg-type]
    assert text in problem


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"masked_softmax_fusion": True},
        {"transformer_impl": "transformer_engine", "masked_softmax_fusion": True, "bf16": True},
        {"tensor_model_parallel_size": 2},
        {"group_query_attention": False, "tensor_model_parallel_size": 4},
        {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": [1, 0]},
        {"qk_clip": False, "log_max_attention_logit": True, "qk_layernorm": True},
        {"multi_latent_attention": True, "qk_layernorm": True},
    ],
)
def test_what_is_not(changes: dict[str, Any]) -> None:
    assert list(rules.qk_clip_problems(options(**changes), frozenset())) == []  # type: ignore[arg-type]


def test_options_without_the_clip_would_be_ignored() -> None:
    found = list(rules.qk_clip_problems(options(qk_clip=False), frozenset({"qk_clip_alpha", "qk_clip_threshold"})))  # type: ignore[arg-type]
    assert [problem.split()[0] for problem in found] == ["--qk-clip-alpha", "--qk-clip-threshold"]
