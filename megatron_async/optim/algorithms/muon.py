# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Muon: orthogonalized momentum, in Moonlight's form.

    M = mu M + (1 - mu) G
    W = (1 - lr wd) W - lr 0.2 √max(rows, columns) orthogonalize(M)

With Nesterov momentum mu M + (1 - mu) G is orthogonalized.
Learning rate: near AdamW's (the paper, E); 2.25e-3 for 10B MoE (5).
Links: https://kellerjordan.github.io/posts/muon/, https://arxiv.org/abs/2502.16982
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from megatron_async.optim.algorithms.batches import Batch, batches
from megatron_async.optim.hyperparameters import COUNT, DECAY, FACTOR, FLAG, Hyperparameters, hyperparameter, literal
from megatron_async.optim.layout import LAYOUT
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import Group, State, StepwiseOptimizer

Coefficients = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"]
ScaleMode = Literal["spectral", "shape_scaling", "unit_rms_norm"]
Precision = Literal["highest", "high", "medium"]

RMS = 0.2
"""Root mean square of an update at lr 1, about AdamW's, so that AdamW's learning rate and decay carry over
(Moonlight, arXiv 2502.16982, section 2.2; arXiv 2606.30634, section 2.1)."""
SAME_BITS = 12
"""Smallest side of a matrix whose products have the same bits in a batch and alone on a CPU (measured, AVX2). Smaller
ones take other kernels: torch has its own loop below 400 multiplications, MKL differs for sides below 12."""
JORDAN = "https://kellerjordan.github.io/posts/muon/"


@dataclass(frozen=True, kw_only=True)
class NewtonSchulzHyperparameters(Hyperparameters):
    """Shared by Muon and its relatives."""

    momentum: float = hyperparameter(
        0.95, DECAY, "mu, weight of the past in the moving average", "the paper, 2.1; it also uses 0.99"
    )
    coefficient_type: Coefficients = literal(
        Coefficients,
        "quintic",
        "coefficients of Newton-Schulz",
        "emerging-optimizers' default; https://leloykun.github.io/ponder/muon-opt-coeffs/",
    )
    num_ns_steps: int = hyperparameter(5, COUNT, "steps of Newton-Schulz", JORDAN, in_group=False)
    fp32_matmul_prec: Precision = literal(
        Precision, "medium", "precision of the products in Newton-Schulz; medium is bf16", f"bf16 products, {JORDAN}"
    )

    @property
    def precision(self) -> str:  # type: ignore[override]
        return {"highest": "fp32", "high": "tf32", "medium": "bf16"}[self.fp32_matmul_prec]

    def flops(self, rows: int, columns: int) -> float:
        """Of Newton-Schulz: with m the smaller side, a step multiplies (m, n) (n, m), (m, m) (m, m), (m, m) (m, n)."""
        short, long = sorted((rows, columns))
        return self.num_ns_steps * (4.0 * short**2 * long + 2.0 * short**3)


@dataclass(frozen=True, kw_only=True)
class ScaledHyperparameters(NewtonSchulzHyperparameters):
    """Shared by those whose update has a scale that depends on the shape."""

    scale_mode: ScaleMode = literal(
        ScaleMode,
        "spectral",
        "factor of the orthogonalized update",
        "update RMS 0.2: Moonlight, arXiv 2502.16982, and the paper, 2.1",
    )


@dataclass(frozen=True, kw_only=True)
class MuonHyperparameters(ScaledHyperparameters):
    nesterov: bool = hyperparameter(
        False, FLAG, "Nesterov momentum", "the paper, algorithm 2; almost no effect for Muon (A.1)", in_group=False
    )
    extra_scale_factor: float | None = hyperparameter(
        None, FACTOR, "takes the place of 0.2 in the spectral scale, of 1 in the others", "none", in_group=False
    )


def rescale(x: Tensor) -> Tensor:
    """Multiply each (rows, columns) matrix by the power of two that brings its largest magnitude into [1/2, 1).

    emerging-optimizers divides by max(norm, 1e-7), which shrinks small gradients: a loss in bf16 scale or a small clip
    factor would silently stop the layer. Scaling by a power of two is exact, so ordinary gradients give the same bits.
    """
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    # 2**126 is the last power whose inverse is a normal number too.
    exponent = torch.frexp(largest).exponent.clamp(-126, 126)
    return x * torch.ldexp(torch.ones_like(largest), -exponent)  # ldexp of each element is slow on a CPU


def orthogonalize(x: Tensor, *, steps: int = 5, coefficients: Coefficients = "quintic") -> Tensor:
    """Replace the singular values of each matrix by values near 1, whatever the scale of `x`; zeros give zeros.

    Args:
        x: (rows, columns) or (batch, rows, columns), fp32. The products run in bf16 when
            `torch.get_float32_matmul_precision()` is "medium", which Muon sets.
        steps: Newton-Schulz iterations. Five bring singular values above 0.003 of the Frobenius norm into [0.97, 1.15]
            with "quintic" and into [0.68, 1.21] with "simple", smaller ones below that.
        coefficients: "simple" are Jordan's (3.4445, -4.7750, 2.0315), the same in each step; "quintic" are five sets,
            one a step; the others are described in emerging-optimizers.

    In fp32 on one CPU thread a matrix has the same bits alone and in a batch.
    """
    if x.ndim == 3 and x.is_cpu and min(x.shape[-2:]) < SAME_BITS:
        return torch.stack([orthogonalize(matrix, steps=steps, coefficients=coefficients) for matrix in x])
    return cast(Tensor, newton_schulz(rescale(x), steps=steps, coefficient_type=coefficients))


def update_scale(rows: int, columns: int, mode: ScaleMode = "spectral", size: float | None = None) -> float:
    """Factor of the orthogonalized update of a matrix with `rows` outputs and `columns` inputs, all shards together.

    - "spectral": 0.2 sqrt(max(rows, columns)), update RMS 0.2 (Moonlight, arXiv 2502.16982)
    - "shape_scaling": sqrt(max(1, rows / columns)) (https://kellerjordan.github.io/posts/muon/)
    - "unit_rms_norm": sqrt(rows / columns) (Scion, arXiv 2502.07529)

    `size` takes the place of 0.2 or, in the last two, of 1.
    """
    if size is None:
        size = RMS if mode == "spectral" else 1.0
    return size * cast(float, get_muon_scale_factor(rows, columns, mode=mode))


class Muon(StepwiseOptimizer):
    """Muon, and the base of the optimizers that change something before or after the orthogonalization.

    Matrices of equal shape are stepped together, see `batches`.

    Args:
        params: fp32 parameters of shape (outputs, inputs), or stacks of them. A weight that fuses several matrices, is
            stacked, or is a tensor-parallel shard needs a `Layout` as its attribute `LAYOUT`.
        values: hyper-parameters, as of the base.
    """

    HYPERPARAMETERS: ClassVar[type[NewtonSchulzHyperparameters]] = MuonHyperparameters
    STATE: ClassVar[State] = {"momentum_buffer": "element"}
    hyperparameters: NewtonSchulzHyperparameters

    def check_parameter(self, param: Tensor) -> None:
        super().check_parameter(param)
        require_matrices(type(self).__name__, param, stacked=hasattr(param, LAYOUT))

    def update(self, params: list[Tensor], grads: list[Tensor], group: Group) -> None:
        state = {name: self.buffers(params, name) for name in self.STATE}
        with fp32_matmul_precision(self.hyperparameters.fp32_matmul_prec):
            for batch in batches(params, grads, state):
                self._step_batch(batch, group)

    def _step_batch(self, batch: Batch, group: Group) -> None:
        update = batch.layout.apply(self._whole_update, self.direction(batch, group))
        self.normalize(update, batch, group)
        torch._foreach_add_(batch.weights, batch.weights, alpha=-group["weight_decay"] * group["lr"])
        # Updates of tall matrices are transposed; foreach operations are fused for equal strides only.
        torch._foreach_add_(batch.weights, update.contiguous().unbind(0), alpha=-group["lr"])

    def direction(self, batch: Batch, group: Group) -> Tensor:
        """Update the momentum; return what is orthogonalized, a new tensor (batch, rows, columns)."""
        momentum = batch.state["momentum_buffer"]
        torch._foreach_lerp_(momentum, batch.grads, 1 - group["momentum"])
        if getattr(self.hyperparameters, "nesterov", False):
            return torch.stack(torch._foreach_lerp(batch.grads, momentum, group["momentum"]))
        return torch.stack(momentum)

    def scale(self, rows: int, columns: int) -> float:
        """Factor of the orthogonalized update of a (rows, columns) matrix."""
        own = self.hyperparameters
        assert isinstance(own, ScaledHyperparameters)
        return update_scale(rows, columns, own.scale_mode, getattr(own, "extra_scale_factor", None))

    def normalize(self, update: Tensor, batch: Batch, group: Group) -> None:
        """Change the scaled update (batch, rows, columns) of this rank's rows and columns in place; Muon does not."""

    def _whole_update(self, x: Tensor) -> Tensor:
        own = self.hyperparameters
        update = orthogonalize(x, steps=own.num_ns_steps, coefficients=own.coefficient_type)
        return update.mul_(self.scale(x.size(-2), x.size(-1)))


def require_matrices(optimizer: str, param: Tensor, *, stacked: bool = False) -> None:
    """Refuse a parameter that is no matrix or, with `stacked`, stack of matrices.

    Raises:
        ValueError: naming its shape.
    """
    if param.ndim != 2 and not (stacked and param.ndim == 3):
        shape = tuple(param.shape)
        raise ValueError(f"{optimizer} steps on matrices; got a parameter of shape {shape}: give it to AdamW")


register(OptimizerSpec("muon", Muon, MuonHyperparameters, Muon.STATE, __doc__, scope="matrix"))
