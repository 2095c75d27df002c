# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Corrections of the gradient delay, by the values of `--staleness-correction`."""

from collections.abc import Mapping

from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_async.mcore.optimizer import inner_optimizers
from megatron_async.optim.corrections.base import PREVIOUS_UPDATE, Correction, leave_out
from megatron_async.optim.corrections.error_feedback import ErrorFeedback
from megatron_async.optim.corrections.gradients import (
    DelayCompensation,
    GradientErrorFeedback,
    RawGradientErrorFeedback,
)
from megatron_async.optim.corrections.weight_prediction import UpdatedWeightPrediction, WeightPrediction

__all__ = [
    "CORRECTIONS",
    "PREVIOUS_UPDATE",
    "Correction",
    "DelayCompensation",
    "ErrorFeedback",
    "GradientErrorFeedback",
    "RawGradientErrorFeedback",
    "UpdatedWeightPrediction",
    "WeightPrediction",
    "leave_out",
    "make",
]

_CLASSES: Mapping[str, type[Correction]] = {
    "error-feedback": ErrorFeedback,
    "weight-prediction": WeightPrediction,
    "weight-prediction-updated": UpdatedWeightPrediction,
    "dc-asgd": DelayCompensation,
    "gradient-error-feedback": GradientErrorFeedback,
    "raw-gradient-error-feedback": RawGradientErrorFeedback,
}
CORRECTIONS = ("none", *_CLASSES)


def make(name: str, strength: float, optimizer: MegatronOptimizer) -> Correction | None:
    """The correction of a Megatron optimizer; None for "none"."""
    if name == "none":
        return None
    return _CLASSES[name]([inner.optimizer for inner in inner_optimizers(optimizer)], strength)
