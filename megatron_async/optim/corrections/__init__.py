# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Corrections of the gradient delay, by the values of `--staleness-correction`."""

from collections.abc import Iterable, Mapping

import torch

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


def make(name: str, strength: float, optimizers: Iterable[torch.optim.Optimizer]) -> Correction | None:
    """The correction of the steps of torch optimizers; None for "none"."""
    return None if name == "none" else _CLASSES[name](optimizers, strength)
