# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 (the platform comes before everything of Megatron)
"""Counts belong to a batch, the bias moves once for each update."""

import pytest
import torch
import torch.distributed as dist

from megatron_async import platform

platform.activate("cpu")

from megatron_async.pipeline.router_bias import RouterBiases

RATE = 0.01


class Router(torch.nn.Module):
    """Counts as Megatron's router does."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.frozen_expert_bias = False
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("local_tokens_per_expert", torch.zeros(experts))

    def send(self, *tokens: int) -> None:
        self.local_tokens_per_expert += torch.tensor(tokens)


@pytest.fixture
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def finish(biases: RouterBiases, batch: int) -> None:
    work = biases.reduce(batch)
    assert work is not None
    work.wait()


def test_the_bias_moves_once_for_the_whole_batch(group):
    router = Router(4)
    biases = RouterBiases(router, group, RATE)
    biases.use(0)
    router.send(6, 2, 0, 0)
    router.send(6, 2, 0, 0)
    finish(biases, 0)
    biases.apply(0)
    torch.testing.assert_close(router.expert_bias, torch.tensor([-RATE, 0.0, RATE, RATE]))
    # The counts have been used up: a batch of equal loads moves nothing.
    biases.use(2)
    router.send(1, 1, 1, 1)
    finish(biases, 2)
    biases.apply(2)
    torch.testing.assert_close(router.expert_bias, torch.tensor([-RATE, 0.0, RATE, RATE]))


def test_micro_batches_of_two_batches_take_turns(group):
    router = Router(2)
    biases = RouterBiases(router, group, RATE)
    for batch, tokens in ((0, (3, 0)), (1, (0, 5)), (0, (0, 2)), (1, (1, 0))):
        biases.use(batch)
        router.send(*tokens)
    finish(biases, 0)
    biases.use(1)
    router.send(9, 0)
    biases.apply(0)
    torch.testing.assert_close(router.expert_bias, torch.tensor([-RATE, RATE]))
    finish(biases, 1)
    biases.apply(1)
    torch.testing.assert_close(router.expert_bias, torch.tensor([-2 * RATE, 2 * RATE]))


def test_a_skipped_update_moves_nothing_and_leaves_no_counts(group):
    router = Router(2)
    biases = RouterBiases(router, group, RATE)
    biases.use(0)
    router.send(8, 0)
    finish(biases, 0)
    biases.forget(0)
    assert not router.expert_bias.any()
    biases.use(2)
    router.send(0, 1)
    finish(biases, 2)
    biases.apply(2)
    torch.testing.assert_close(router.expert_bias, torch.tensor([RATE, -RATE]))


def test_routers_without_a_bias_do_not_stop_the_others(group):
    chunk = torch.nn.ModuleList([torch.nn.Linear(1, 1), Router(2), Router(2)])
    chunk[1].expert_bias = None
    biases = RouterBiases(chunk, group, RATE)
    biases.use(0)
    chunk[2].send(0, 4)
    finish(biases, 0)
    biases.apply(0)
    torch.testing.assert_close(chunk[2].expert_bias, torch.tensor([RATE, -RATE]))
    assert RouterBiases(chunk[0], group, RATE).reduce(0) is None
