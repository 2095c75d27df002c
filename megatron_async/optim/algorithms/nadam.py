# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""NAdam: AdamW with Nesterov momentum on a schedule, as asynchronous pipelines have used it.

    mu_t = beta1 (1 - 0.96^(t psi) / 2)
    m = beta1 m + (1 - beta1) G
    v = beta2 v + (1 - beta2) G²
    D = mu_{t+1} m / (1 - Π mu up to t+1) + (1 - mu_t) G / (1 - Π mu up to t)
    W = (1 - lr wd) W - lr D / (√v̂ + eps)

torch's class with decoupled decay and state that can be allocated before a step; psi is momentum_decay. In the paper
error feedback does not help NAdam.
Learning rate: near AdamW's (the paper, E).
Links: https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ, https://arxiv.org/abs/2505.01099,
https://docs.pytorch.org/docs/stable/generated/torch.optim.NAdam.html
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.hyperparameters import NON_NEGATIVE, RATES, Hyperparameters, epsilon, hyperparameter
from megatron_async.optim.registry import OptimizerSpec, register
from megatron_async.optim.state import EagerState, State


@dataclass(frozen=True, kw_only=True)
class NAdamHyperparameters(Hyperparameters):
    betas: tuple[float, float] = hyperparameter(
        (0.99, 0.999), RATES, "rates of the first and second moment", "beta1: arXiv 2505.01099; beta2: torch"
    )
    eps: float = epsilon()
    momentum_decay: float = hyperparameter(
        4e-3, NON_NEGATIVE, "psi, how fast the momentum reaches beta1", "torch; arXiv 2505.01099's code"
    )


class NAdam(EagerState, torch.optim.NAdam):
    """torch's NAdam, for fp32 parameters of any shape."""

    HYPERPARAMETERS = NAdamHyperparameters
    STATE: ClassVar[State] = {"exp_avg": "element", "exp_avg_sq": "element"}
    COUNTS_STEPS = True

    def __init__(self, params: ParamsT, **values: Any) -> None:
        super().__init__(params, **vars(self.HYPERPARAMETERS(**values)), decoupled_weight_decay=True)

    def init_state(self, param: Tensor) -> None:
        super().init_state(param)
        self.state[param].setdefault("mu_product", torch.ones((), dtype=torch.float32))

    def _init_group(self, group: dict[str, Any], *args: Any) -> bool:  # type: ignore[override]
        # torch allocates where the state is empty; it is not where a correction keeps something there.
        EagerState._init_group(self, group)
        return bool(torch.optim.NAdam._init_group(self, group, *args))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Loading moves every state tensor but "step" to the parameter's device, where torch would have to read this
        # one back in each step.
        for entry in self.state.values():
            if "mu_product" in entry:
                entry["mu_product"] = entry["mu_product"].cpu()


register(OptimizerSpec("nadam", NAdam, NAdamHyperparameters, NAdam.STATE, __doc__))
