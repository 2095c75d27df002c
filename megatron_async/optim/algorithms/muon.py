# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Muon (https://kellerjordan.github.io/posts/muon/), orthogonalized momentum, in Moonlight's form.

    M = mu M + (1 - mu) G
    D = mu M + (1 - mu) G  with Nesterov momentum, else M
    W = (1 - lr wd) W - lr scale(rows, columns) orthogonalize(D)

The momentum is a moving average, not a sum. They differ by the factor 1 / (1 - mu), which orthogonalizing
removes. A gradient that has always been zero moves the weights by weight decay alone.
"""

from typing import Any, ClassVar, Literal, cast

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer, get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.ranges import Rule
from megatron_async.optim.algorithms.state import EagerState, Shape

Coefficients = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"]
ScaleMode = Literal["spectral", "shape_scaling", "unit_rms_norm"]
Precision = Literal["highest", "high", "medium"]

RMS = 0.2
"""Root mean square of an update at lr 1, about AdamW's, so that AdamW's learning rate and decay carry over
(Moonlight, arXiv 2502.16982, section 2.2; arXiv 2606.30634, section 2.1)."""


def rescale(x: Tensor, largest: Tensor | None = None) -> Tensor:
    """Multiply each matrix by the power of two that brings its largest magnitude into [1/2, 1).

    emerging-optimizers divides by max(norm, 1e-7), which shrinks what is smaller: a loss in bf16 scale or a
    small clip factor would silently stop the layer. Scaling by a power of two is exact, so ordinary gradients
    give the same bits as without it.

    Args:
        x: (..., rows, columns), fp32.
        largest: the largest magnitude of each matrix, broadcastable to ``x``; computed where not given.
            Shards of one matrix must be given that of the whole.
    """
    if largest is None:
        largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    # 2**126 is the last power whose inverse is a normal number too.
    return torch.ldexp(x, -torch.frexp(largest).exponent.clamp(-126, 126))


def orthogonalize(x: Tensor, *, steps: int = 5, coefficients: Coefficients = "quintic") -> Tensor:
    """Replace the singular values of each matrix by values near 1, whatever the scale of ``x``.

    The result approximates U V^T of the singular value decomposition x = U S V^T. Five steps do not converge to
    it: singular values above 0.003 of the Frobenius norm end in [0.97, 1.15] with "quintic" and in [0.68, 1.21]
    with "simple", smaller ones below that. Zeros give zeros.

    Args:
        x: (rows, columns) or (batch, rows, columns), fp32. The products run in bf16 when
            ``torch.get_float32_matmul_precision()`` is "medium", which is what Muon sets.
        steps: Newton-Schulz iterations.
        coefficients: "simple" are Jordan's (3.4445, -4.7750, 2.0315), the same in each step; "quintic" are
            five sets, one a step (https://leloykun.github.io/ponder/muon-opt-coeffs/); the others are
            described in emerging-optimizers.
    """
    return cast(Tensor, newton_schulz(rescale(x), steps=steps, coefficient_type=coefficients))


def update_scale(rows: int, columns: int, mode: ScaleMode = "spectral") -> float:
    """Factor of the orthogonalized update of a matrix with ``rows`` outputs and ``columns`` inputs.

    Give it the shape of the whole matrix, not of a tensor-parallel shard.

    - "spectral": 0.2 sqrt(max(rows, columns)), update RMS 0.2 (Moonlight, arXiv 2502.16982)
    - "shape_scaling": sqrt(max(1, rows / columns)) (https://kellerjordan.github.io/posts/muon/)
    - "unit_rms_norm": sqrt(rows / columns) (Scion, arXiv 2502.07529;
      https://jeremybernste.in/writing/deriving-muon)
    """
    factor = cast(float, get_muon_scale_factor(rows, columns, mode=mode))
    return RMS * factor if mode == "spectral" else factor


def align_rms(update: Tensor, mean_square: Tensor | None = None) -> Tensor:
    """Scale an update to a root mean square of 0.2, that is by 0.2 sqrt(rows columns) / ||update||_F.

    Args:
        update: (..., columns); zeros stay zeros.
        mean_square: mean of the squares over the whole matrix where ``update`` is a shard of it.
    """
    if mean_square is None:
        mean_square = update.square().mean()
    return update * (RMS * mean_square.clamp_min(torch.finfo(update.dtype).tiny).rsqrt())


class Muon(EagerState, OrthogonalizedOptimizer):
    """Muon, and the base of the optimizers that change what happens before or after orthogonalization.

    A tensor-parallel version inherits from an optimizer here first and from Megatron's ``TensorParallelMuon``
    second, calls the latter's constructor, sets what :attr:`GROUP_EXTRAS` names in its parameter groups and
    overrides the hooks :meth:`largest_magnitude`, :meth:`blocks` and :meth:`shard_mean`.

    Args:
        params: 2-D fp32 parameters of shape (outputs, inputs).
        lr: learning rate.
        momentum: mu, the weight of the past in the moving average of the gradients.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.
        nesterov: orthogonalize mu M + (1 - mu) G in place of M.
        coefficient_type: of the Newton-Schulz steps, see :func:`orthogonalize`.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: see :func:`update_scale`.
        fp32_matmul_prec: precision of the products in Newton-Schulz; "medium" is bf16.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    RULES: ClassVar[dict[str, Rule]] = {
        "lr": ranges.NON_NEGATIVE,
        "momentum": ranges.DECAY,
        "weight_decay": ranges.NON_NEGATIVE,
        "nesterov": ranges.FLAG,
        "coefficient_type": ranges.Choice(("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4")),
        "num_ns_steps": ranges.Count(1),
        "scale_mode": ranges.Choice(("spectral", "shape_scaling", "unit_rms_norm")),
        "fp32_matmul_prec": ranges.Choice(("highest", "high", "medium")),
    }
    GROUP_EXTRAS: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that a subclass keeps in its parameter groups, besides those Muon keeps there."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = False,
        coefficient_type: Coefficients = "quintic",
        num_ns_steps: int = 5,
        scale_mode: ScaleMode = "spectral",
        fp32_matmul_prec: Precision = "medium",
    ) -> None:
        values = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "coefficient_type": coefficient_type,
            "num_ns_steps": num_ns_steps,
            "scale_mode": scale_mode,
            "fp32_matmul_prec": fp32_matmul_prec,
        }
        self._construct(params, values)

    def _construct(self, params: ParamsT, values: dict[str, Any]) -> None:
        """Check the hyper-parameters and set up the loop of emerging-optimizers with them."""
        ranges.check(type(self).__name__, self.RULES, values)
        self.scale_mode = values.get("scale_mode")

        def scaled_orthogonalize(x: Tensor) -> Tensor:
            orthogonal = newton_schulz(x, steps=values["num_ns_steps"], coefficient_type=values["coefficient_type"])
            return cast(Tensor, orthogonal * self.scale(x.size(-2), x.size(-1)))

        # Named, not super(): the next class may be Megatron's, whose constructor takes other arguments.
        OrthogonalizedOptimizer.__init__(
            self,
            params,
            values["lr"],
            values["momentum"],
            values["weight_decay"],
            nesterov=values.get("nesterov", False),
            weight_decay_method="decoupled",
            fp32_matmul_prec=values["fp32_matmul_prec"],
            scaled_orthogonalize_fn=scaled_orthogonalize,
            **{name: values[name] for name in self.GROUP_EXTRAS},
        )

    def state_shapes(self, param: Tensor) -> dict[str, Shape]:
        if param.ndim != 2:
            raise ValueError(
                f"{type(self).__name__} steps on matrices; got a parameter of shape {tuple(param.shape)}: "
                f"give it to AdamW"
            )
        return {"momentum_buffer": tuple(param.shape)}

    def scale(self, rows: int, columns: int) -> float:
        """Factor of the orthogonalized update of a (rows, columns) matrix."""
        return update_scale(rows, columns, cast(ScaleMode, self.scale_mode))

    def orthogonalize(self, p: Tensor, grad: Tensor, **kwargs: Any) -> Tensor:
        """Orthogonalize and scale the momentum ``grad`` of the parameter ``p``; called by the loop."""
        return cast(Tensor, super().orthogonalize(p, rescale(grad, self.largest_magnitude(p, grad)), **kwargs))

    def largest_magnitude(self, p: Tensor, x: Tensor) -> Tensor:
        """Hook: largest magnitude in the whole matrix of which ``x`` is this rank's shard.

        A sharded version must take the maximum over the ranks, or each would scale its shard differently.
        """
        return x.abs().amax()

    def blocks(self, p: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Hook: views of ``x`` that are matrices of their own, such as Q, K and V of a fused projection.

        ``x`` has the rows of ``p``. The last axis of a view holds the columns, all axes before it are rows.
        """
        return (x,)

    def shard_mean(self, p: Tensor, mean: Tensor, *, within_rows: bool = False) -> Tensor:
        """Hook: average of ``mean`` over the ranks that hold equal shards of ``p``.

        ``within_rows``: it is a mean over each row, complete already where ``p`` is sharded by rows.
        """
        return mean
