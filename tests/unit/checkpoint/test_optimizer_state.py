# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Settings of saved parameter groups find their place in another tree of optimizers."""

from types import SimpleNamespace
from typing import Any

from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_async.checkpoint.optimizer_state import fit


def group(wd_mult: float, *, experts: bool = False, **settings: Any) -> dict[str, Any]:
    return {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": experts, **settings}


def one(*groups: dict[str, Any]) -> Any:
    return SimpleNamespace(is_stub_optimizer=False, optimizer=SimpleNamespace(param_groups=list(groups)))


def chain(*members: Any) -> Any:
    optimizer = ChainedOptimizer.__new__(ChainedOptimizer)
    optimizer.chained_optimizers = list(members)
    return optimizer


def fitted(tree: Any, optimizer: Any) -> Any:
    return fit(optimizer, {"optimizer": tree, "iteration": 7})["optimizer"]


def saved(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"state": {"common_step": 7}, "param_groups": list(groups)}


DECAYED, PLAIN = group(1.0, lr=0.25), group(0.0, lr=0.5)


def test_the_same_tree_stays():
    assert fitted(saved(DECAYED, PLAIN), one(group(1.0), group(0.0))) == saved(DECAYED, PLAIN)


def test_experts_get_an_optimizer_of_their_own():
    result = fitted(saved(DECAYED, PLAIN), chain(one(group(1.0), group(0.0)), one(group(1.0, experts=True))))
    assert result == {0: saved(DECAYED, PLAIN), 1: saved(DECAYED | {"is_expert_parallel": True})}


def test_experts_lose_their_optimizer():
    tree = {0: saved(DECAYED, PLAIN), 1: saved(DECAYED | {"is_expert_parallel": True})}
    assert fitted(tree, one(group(0.0), group(1.0))) == saved(PLAIN, DECAYED), "in the order of this run's groups"


def test_each_chunk_gets_the_kinds_of_optimizers_that_it_has():
    """Muon steps on matrices, Adam on the rest; master weights put the torch optimizer's part one level down."""
    matrices, rest = group(1.0, optimizer="muon", lr=0.1), group(1.0, optimizer="adam", lr=0.2)
    tree = {0: {"optimizer": saved(matrices)}, 1: {"optimizer": saved(rest)}}
    chunk = chain(one(group(1.0, optimizer="muon")), one(group(1.0, optimizer="adam")))
    assert fitted(tree, chain(chunk, chunk)) == {0: tree, 1: tree}
    assert fitted({0: tree, 1: tree}, chunk) == tree


def test_nothing_is_shared_between_optimizers():
    tree = fitted(saved(DECAYED), chain(one(group(1.0)), one(group(1.0))))
    tree[0]["param_groups"][0]["lr"] = 9.0
    assert tree[1]["param_groups"][0]["lr"] == 0.25 == DECAYED["lr"]
