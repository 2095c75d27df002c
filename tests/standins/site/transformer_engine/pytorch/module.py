# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Layers with Transformer Engine's treatment of weights and their gradients."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

MAIN_GRAD_AT_FORWARD = False
"""Whether a forward notes main_grad, instead of the backward."""


class _LinearFunction(torch.autograd.Function):
    """y = x W^T, with a gradient of W that goes to `main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inputs: Tensor, fused: bool, first: bool | None) -> Tensor:
        ctx.save_for_backward(weight, inputs)
        ctx.fused, ctx.accumulates = fused, not first
        if fused:
            ctx.origin = weakref.ref(weight)
            noted = getattr(weight, "main_grad", None)
            ctx.main_grad = (lambda: noted) if MAIN_GRAD_AT_FORWARD else (lambda: weight.main_grad)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, inputs = ctx.saved_tensors
        own = gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)
        if ctx.fused:
            main_grad, origin = ctx.main_grad(), ctx.origin()
            main_grad.mul_(1.0 if ctx.accumulates else 0.0).add_(own)
            origin.grad_added_to_main_grad = True
            fill = 0.0 if getattr(origin, "zero_out_wgrad", False) else math.nan
            own = torch.full_like(weight, fill)
        return own, gradient @ weight, None, None


class Layer(torch.nn.Module):
    """What Transformer Engine's layers have in common."""

    def _register(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, draw: Callable[[Tensor], Any]) -> None:
        """Make a parameter, draw it, and wrap it anew."""
        weight = Parameter(torch.empty(shape, dtype=dtype))
        with torch.no_grad():
            draw(weight)
        setattr(self, name, Parameter(weight.data))

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0


class RMSNorm(Layer):
    def __init__(
        self,
        normalized_shape: int,
        eps: float,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        self._eps, self._offset = eps, 1.0 if zero_centered_gamma else 0.0
        self._register("weight", (normalized_shape,), params_dtype, lambda weight: weight.fill_(1.0 - self._offset))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, inputs: Tensor) -> Tensor:
        return _rms_norm(inputs, self.weight + self._offset, self._eps)


def _rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = inputs.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.float()).to(inputs.dtype)


class Linear(Layer):
    """A linear layer without bias, column-parallel, row-parallel or whole."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias and not return_bias
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, parallel_mode
        self.tp_size, self.sequence_parallel = tp_size, sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        shape = (
            out_features // (tp_size if parallel_mode == "column" else 1),
            in_features // (tp_size if parallel_mode == "row" else 1),
        )
        for name in self.weight_names():
            self._register(name, shape, params_dtype, init_method)
            mark_sharded(getattr(self, name), parallel_mode)

    def weight_names(self) -> Sequence[str]:
        return ("weight",)

    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return _parallel(self, inputs, lambda own: self.product(self.weight, own, is_first_microbatch))

    def product(self, weight: Parameter, inputs: Tensor, first: bool | None) -> Tensor:
        return _LinearFunction.apply(weight, inputs, self.fuse_wgrad_accumulation, first)


def mark_sharded(weight: Parameter, mode: str | None) -> None:
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    set_tensor_model_parallel_attributes(weight, mode is not None, 1 if mode == "row" else 0, 1)


def _parallel(layer: Linear, inputs: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """The product, with the communication of tensor-parallel ranks around it."""
    from megatron.core.tensor_parallel import mappings

    if layer.tp_size == 1 or layer.parallel_mode is None:
        return product(inputs)
    if layer.parallel_mode == "column":
        if layer.sequence_parallel:
            return product(mappings.gather_from_sequence_parallel_region(inputs))
        return product(mappings.copy_to_tensor_model_parallel_region(inputs))
    if layer.sequence_parallel:
        return mappings.reduce_scatter_to_sequence_parallel_region(product(inputs))
    return mappings.reduce_from_tensor_model_parallel_region(product(inputs))


class LayerNormLinear(Linear):
    """RMSNorm and a column-parallel linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm" and not return_layernorm_output
        self._eps, self._offset = eps, 1.0 if zero_centered_gamma else 0.0
        self._register(
            "layer_norm_weight", (in_features,), self.weight.dtype, lambda weight: weight.fill_(1.0 - self._offset)
        )
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return super().forward(_rms_norm(inputs, self.layer_norm_weight + self._offset, self._eps), is_first_microbatch)


class GroupedLinear(Linear):
    """Linear layers of several experts, each for its own rows."""

    fp8 = fp8_calibration = use_bias = False

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **options)
        self.fp8_meta = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int) -> None:
        """Nothing is in FP8."""

    def weight_names(self) -> Sequence[str]:
        return [f"weight{number}" for number in range(self.num_gemms)]

    def forward(self, inputs: Tensor, rows: Sequence[int], is_first_microbatch: bool | None = None) -> Tensor:
        weights = [getattr(self, name) for name in self.weight_names()]
        parts = zip(weights, inputs.split(list(rows)), strict=True)
        return torch.cat([self.product(weight, part, is_first_microbatch) for weight, part in parts])
