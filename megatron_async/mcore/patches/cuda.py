# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Patches on GPUs alone. Megatron is imported when they are applied, not before."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_async.mcore.patches.patch import Patch


def _fused_where_possible(original: Callable[..., None]) -> Callable[..., None]:
    """Build a layer of Megatron's own, such as the LM head, without Apex's kernel where Apex is missing.

    Layers of Transformer Engine go on adding weight gradients to `main_grad` by their own kernels.
    """
    from megatron.core.tensor_parallel import layers

    from megatron_async.mcore.arguments import overridden

    @functools.wraps(original)
    def build(self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
        fused = config.gradient_accumulation_fusion and layers._grad_accum_fusion_available
        with overridden(config, gradient_accumulation_fusion=fused):
            original(self, *args, config=config, **kwargs)

    return build


PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear.__init__",
        "the LM head cannot be built without Apex unless every layer gives up fused weight gradients",
        "core/tensor_parallel/layers.py: if config.gradient_accumulation_fusion and not _grad_accum_fusion_available:",
        _fused_where_possible,
        ("cuda",),
    ),
)
