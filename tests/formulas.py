# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Closed formulas for bubbles: the model of the DeepSeek-V3 report (arXiv 2412.19437, section 3.2).

All give rho, the bubble of one batch over the compute of one batch, M (F + B) per rank, for P stages and M
micro-batches. F is the forward of one micro-batch through a stage, B the whole backward, W the part of it
that makes weight gradients. A batch takes 1 + rho times its compute; the share of time lost is rho / (1 +
rho).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatchCosts:
    """Times of one micro-batch through one stage, in any unit.

    Attributes:
        forward: F.
        backward: B, the whole backward: input gradients, weight gradients, recomputation.
        weight_gradient: W, contained in B.
    """

    forward: float
    backward: float
    weight_gradient: float

    def __post_init__(self) -> None:
        if min(self.forward, self.backward) <= 0 or not 0 <= self.weight_gradient <= self.backward:
            raise ValueError(
                f"forward {self.forward} and backward {self.backward} must be positive, and weight_gradient"
                f" {self.weight_gradient} a part of the backward"
            )


def one_f_one_b_bubble(stages: int, microbatches: int) -> float:
    """1F1B and GPipe: (P - 1) / M, whatever F and B are."""
    return (stages - 1) / microbatches


def interleaved_bubble(stages: int, microbatches: int, chunks: int) -> float:
    """Interleaved 1F1B with v chunks per rank (arXiv 2104.04473, section 2.2): (P - 1) / (v M)."""
    return (stages - 1) / (chunks * microbatches)


def zb1p_bubble(stages: int, microbatches: int, costs: MicroBatchCosts) -> float:
    """Zero-bubble ZB-H1, called ZB1P (arXiv 2401.10241): (P - 1) (F + B - 2W) / (M (F + B))."""
    compute = costs.forward + costs.backward
    return (stages - 1) * (compute - 2 * costs.weight_gradient) / (microbatches * compute)


def dualpipe_bubble(stages: int, microbatches: int, costs: MicroBatchCosts) -> float:
    """DualPipe: (P/2 - 1) (F&B + B - 3W) / (M (F + B)), the overlapped pair F&B taken as F + B."""
    compute = costs.forward + costs.backward
    exposed = compute + costs.backward - 3 * costs.weight_gradient
    return (stages / 2 - 1) * exposed / (microbatches * compute)


def asynchronous_bubble() -> float:
    """2BW in steady state: 0 for M >= P."""
    return 0.0


def one_f_one_b_batch_time(stages: int, microbatches: int, forward: float, backward: float) -> float:
    """Time of one drained 1F1B batch on balanced stages with free transfers: (M + P - 1) (F + B)."""
    return (microbatches + stages - 1) * (forward + backward)
