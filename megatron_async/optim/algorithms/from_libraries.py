# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch and emerging-optimizers."""

from dataclasses import dataclass

import torch
from emerging_optimizers.scalar_optimizers import Lion

from megatron_async.optim.hyperparameters import DECAY, NON_NEGATIVE, RATES, Hyperparameters, epsilon, hyperparameter
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import State


@dataclass(frozen=True, kw_only=True)
class AdamHyperparameters(Hyperparameters):
    """AdamW: moving averages of the gradient and its square, decoupled weight decay.

        m = beta1 m + (1 - beta1) G
        v = beta2 v + (1 - beta2) G²
        W = (1 - lr wd) W - lr m̂ / (√v̂ + eps)

    Learning rate: 4e-3 for 135M, 2e-3 for 360M parameters (the paper, E).
    Links: https://arxiv.org/abs/1711.05101
    """

    betas: tuple[float, float] = hyperparameter(
        (0.9, 0.95), RATES, "rates of the first and second moment", "the paper, 2.1"
    )
    eps: float = epsilon()


@dataclass(frozen=True, kw_only=True)
class SgdHyperparameters(Hyperparameters):
    """Stochastic gradient descent with momentum; its weight decay is part of the gradient.

        m = mu m + G + wd W
        W = W - lr m

    Learning rate: not in the paper; for tests and baselines.
    Links: https://proceedings.mlr.press/v28/sutskever13.html
    """

    weight_decay: float = hyperparameter(0.1, NON_NEGATIVE, "part of the gradient: G + weight_decay W", "the paper, E")
    momentum: float = hyperparameter(0.9, DECAY, "weight of the past in the sum of gradients", "Megatron-LM's default")


@dataclass(frozen=True, kw_only=True)
class LionHyperparameters(Hyperparameters):
    """Lion: sign of an interpolated momentum.

        W = (1 - lr wd) W - lr sign(beta1 m + (1 - beta1) G)
        m = beta2 m + (1 - beta2) G

    Every element moves by the learning rate, which is therefore smaller than AdamW's, and the weight decay larger.
    Learning rate: about 5e-4 (the paper, E).
    Links: https://arxiv.org/abs/2302.06675
    """

    weight_decay: float = hyperparameter(0.5, NON_NEGATIVE, "decoupled, as AdamW's", "the paper, E")
    betas: tuple[float, float] = hyperparameter(
        (0.9, 0.99), RATES, "rates of the step and of the momentum", "arXiv 2302.06675, section 5"
    )


_MOMENTS: State = {"exp_avg": "element", "exp_avg_sq": "element"}
_MOMENTUM: State = {"momentum_buffer": "element"}
register(OptimizerSpec("adam", torch.optim.AdamW, AdamHyperparameters, _MOMENTS, AdamHyperparameters.__doc__))
register(OptimizerSpec("sgd", torch.optim.SGD, SgdHyperparameters, _MOMENTUM, SgdHyperparameters.__doc__))
register(OptimizerSpec("lion", Lion, LionHyperparameters, {"exp_avg": "element"}, LionHyperparameters.__doc__))
