# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Jobs that train with stand-ins for libraries that need a GPU."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

from tests.distributed.jobs import BASE, Outcome, train
from tests.standins import FusedAdam, FusedWeightGradient


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Megatron finds Transformer Engine's Adam."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with (
        mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
        mock.patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", True),
        mock.patch.object(optimizer, "Adam", FusedAdam, create=True),
        mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False),
    ):
        yield


@contextlib.contextmanager
def fused_weight_gradients() -> Iterator[None]:
    """Megatron finds Apex's kernel and, as on GPUs, uses it by default."""
    from megatron.core.tensor_parallel import layers

    from megatron_async.platform import cpu

    defaults = {name: value for name, value in cpu.DEFAULTS.items() if name != "gradient_accumulation_fusion"}
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", FusedWeightGradient, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(cpu, "DEFAULTS", defaults),
    ):
        yield


@contextlib.contextmanager
def transformer_engine(at_forward: bool = False) -> Iterator[None]:
    """Megatron uses Transformer Engine's layers and Adam, and Apex's kernel, all by default as on GPUs.

    Args:
        at_forward: whether a fused weight gradient takes `main_grad` in the forward.
    """
    from transformer_engine.pytorch import module  # the stand-in

    from megatron_async.platform import cpu

    with fused_weight_gradients():
        defaults = {name: value for name, value in cpu.DEFAULTS.items() if name != "transformer_impl"}
        with (
            mock.patch.object(cpu, "DEFAULTS", defaults),
            mock.patch.object(module, "MAIN_GRAD_AT_FORWARD", at_forward),
        ):
            yield


STANDINS: dict[str, Any] = {
    "FusedAdam": fused_adam,
    "fused weight gradients": fused_weight_gradients,
    "Transformer Engine": transformer_engine,
    "Transformer Engine, main_grad at forward": partial(transformer_engine, at_forward=True),
}


def train_with(standin: str, arguments: Sequence[str], base: Sequence[str] = BASE) -> Outcome:
    """As `train`, with one of `STANDINS`."""
    with STANDINS[standin]():
        return train(arguments, base=base)


def fused_squared_relus(arguments: Sequence[str], base: Sequence[str]) -> tuple[Outcome, int]:
    """`train_with` Transformer Engine; also how often Megatron's fused squared ReLU of experts has run."""
    from megatron.core.transformer.moe import experts

    fused = mock.Mock(wraps=experts.weighted_squared_relu_impl)
    with mock.patch.object(experts, "weighted_squared_relu_impl", fused):
        return train_with("Transformer Engine", arguments, base), fused.call_count


def fused_gradients(arguments: Sequence[str]) -> int:
    """Train; how many weight gradients the stand-in for Apex's kernel has added."""
    count, original = 0, FusedWeightGradient.wgrad_gemm_accum_fp32

    def counted(*tensors: Any) -> None:
        nonlocal count
        count += 1
        original(*tensors)

    with mock.patch.object(FusedWeightGradient, "wgrad_gemm_accum_fp32", counted):
        train_with("fused weight gradients", arguments)
    return count


def uneven_collectives(rows: Sequence[int]) -> list[list[float]]:
    """What this rank gets from Megatron's gather and scatter of `rows[r]` rows of rank r, and from an exchange in which
    rank r sends `rows[d]` rows to rank d. Row i of rank r holds 100 r + i; the scattered sum is over ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    own = 100.0 * rank + torch.arange(rows[rank]).float()
    gathered = [torch.full((count,), math.nan) for count in rows]
    dist.all_gather(gathered, own)
    whole = 100.0 * rank + torch.arange(sum(rows)).float()
    scattered = torch.full((rows[rank],), math.nan)
    dist.reduce_scatter(scattered, list(whole.split(list(rows))))
    exchanged = torch.full((size * rows[rank],), math.nan)
    sizes = torch.tensor([rows[rank]] * size), torch.tensor(list(rows))
    dist.all_to_all_single(exchanged, whole, *sizes)
    dist.destroy_process_group()
    return [torch.cat(gathered).tolist(), scattered.tolist(), exchanged.tolist()]
