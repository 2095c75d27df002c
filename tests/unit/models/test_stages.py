# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Stages of the small presets, built as ranks of a job whose other processes do not exist."""

import argparse

import pytest
import torch

from megatron_async import platform

platform.activate("cpu")

from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training.training import get_megatron_optimizer_config  # noqa: E402

from megatron_async.config import arguments  # noqa: E402
from megatron_async.mcore import parallel  # noqa: E402
from megatron_async.mcore.model import build_model, tied_embedding  # noqa: E402
from megatron_async.models import gpt  # noqa: E402
from megatron_async.models.presets import PRESETS  # noqa: E402
from tests.distributed.model_jobs import RUN  # noqa: E402

SMALL = [name for name in PRESETS if name.endswith(("mini", "tiny"))]


def parsed(monkeypatch, words: str) -> argparse.Namespace:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    return arguments.parse([*RUN, *words.split()])


def stage(args: argparse.Namespace, rank: int) -> torch.nn.Module:
    """The unwrapped model chunk of a rank, with its initial weights."""
    parallel.pretend_rank(args, rank)
    config = gpt.model_config(args, args.vocab_size)
    chunks = [build_model(config, ProcessGroupCollection.use_mpu_process_groups(), None)]
    for hook in config.pre_wrap_hooks:
        chunks = hook(chunks)
    return chunks[0]


def test_a_rank_that_pretends_has_its_groups(monkeypatch):
    """Rank 13 of 2 stages, 4 replicas and 2 tensor-parallel ranks; experts over 4 ranks."""
    args = parsed(monkeypatch, "--model moe-2b-mini --pipeline-model-parallel-size 2")
    args.world_size, args.tensor_model_parallel_size = 16, 2
    args.expert_model_parallel_size, args.expert_tensor_parallel_size = 4, 1
    parallel.pretend_rank(args, 13)
    try:
        found = ProcessGroupCollection.use_mpu_process_groups()
        members = parallel.dist.get_process_group_ranks
        assert [members(group) for group in (found.tp, found.pp, found.dp)] == [[12, 13], [5, 13], [9, 11, 13, 15]]
        assert (members(found.ep), members(found.expt_dp)) == ([12, 13, 14, 15], [9, 13])
        assert members(found.mp) == [4, 5, 12, 13]
    finally:
        parallel.mpu.destroy_model_parallel()
        parallel.dist.destroy_process_group()


@pytest.mark.parametrize("spread", ["", "--embedding-init-method-std 0.5"])
@pytest.mark.parametrize("name", SMALL)
def test_tied_copies_begin_equal(monkeypatch, name, spread):
    """Input embedding and head of every family, tied or made so."""
    args = parsed(monkeypatch, f"--model {name} --pipeline-model-parallel-size 2 {spread}")
    args.untie_embeddings_and_output_weights = False
    copies = []
    for rank in (0, 1):
        try:
            copies.append(tied_embedding(stage(args, rank)))
        finally:
            parallel.mpu.destroy_model_parallel()
            parallel.dist.destroy_process_group()
    assert copies[0] is not copies[1] and torch.equal(*copies)
    assert float(copies[0][:60].std()) == pytest.approx(0.5 if spread else args.init_method_std, rel=0.1)


@pytest.mark.parametrize("wanted", [False, True])
def test_weight_decay_of_query_and_key_norms(monkeypatch, wanted):
    """Only matrices decay; with --apply-wd-to-qk-layernorm the scales of query and key norms do too."""
    word = "--apply-wd-to-qk-layernorm" if wanted else ""
    args = parsed(monkeypatch, f"--model tiny --qk-layernorm --pipeline-model-parallel-size 2 {word}")
    try:
        chunk = stage(args, 0)
        config, _ = get_megatron_optimizer_config(args)
        monkeypatch.setattr(torch.distributed, "all_gather_object", lambda objects, own, group=None: fill(objects, own))
        groups = _get_param_groups([chunk], config, get_standard_config_overrides(config))
    finally:
        parallel.mpu.destroy_model_parallel()
        parallel.dist.destroy_process_group()
    decays = {id(param): group["wd_mult"] for group in groups for param in group["params"]}
    norms = 0
    for name, param in chunk.named_parameters():
        norm = "q_layernorm" in name or "k_layernorm" in name
        norms += norm
        assert decays[id(param)] == (1.0 if param.ndim > 1 or (norm and wanted) else 0.0), name
    assert norms == 2 * args.num_layers / 2


def fill(objects, own):
    objects[:] = [own] * len(objects)
