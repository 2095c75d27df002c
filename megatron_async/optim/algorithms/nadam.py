# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""NAdam (Dozat 2016) as in torch, with decoupled weight decay and state that can be allocated before a step.

arXiv 2606.30634 compares it because Ajanthan et al. (arXiv 2505.01099) use it, with beta1 0.99, for
asynchronous pipelines.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.ranges import Rule
from megatron_async.optim.algorithms.state import require_fp32


class NAdam(torch.optim.NAdam):
    """torch's NAdam.

    Args:
        params: fp32 parameters.
        lr: learning rate.
        betas: of the moments. 0.99 is what Ajanthan et al. use against delay; beta2 is torch's.
        eps: added to the root of the second moment.
        weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.
        momentum_decay: how fast the momentum schedule reaches beta1: mu_t = beta1 (1 - 0.96^(t psi) / 2).
            0.004 is torch's default and Ajanthan et al.'s.

    Raises:
        ValueError: listing every hyper-parameter outside its range.
    """

    RULES: ClassVar[dict[str, Rule]] = {
        "lr": ranges.NON_NEGATIVE,
        "betas": ranges.Several(2, ranges.DECAY),
        "eps": ranges.POSITIVE,
        "weight_decay": ranges.NON_NEGATIVE,
        "momentum_decay": ranges.NON_NEGATIVE,
    }

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum_decay: float = 4e-3,
    ) -> None:
        values = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
        }
        ranges.check("NAdam", self.RULES, values)
        super().__init__(params, lr, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay=True)

    def init_state(self, param: Tensor) -> None:
        """Allocate the state of one parameter as torch's first step would. Buffers that exist stay.

        Raises:
            ValueError: the parameter is not fp32.
        """
        require_fp32("NAdam", param)
        state = self.state[param]
        if "step" in state:
            return
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["mu_product"] = torch.ones((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def init_states(self) -> None:
        """Allocate the state of every parameter."""
        for group in self.param_groups:
            for param in group["params"]:
                self.init_state(param)

    def _init_group(self, group: dict[str, Any], *args: Any) -> bool:
        # torch allocates where the state is empty; it is not where a correction keeps something there.
        for param in group["params"]:
            if param.grad is not None:
                self.init_state(param)
        return bool(super()._init_group(group, *args))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Loading moves every state tensor but "step" to the parameter's device, where torch would have to
        # read this one back in each step.
        for entry in self.state.values():
            if "mu_product" in entry:
                entry["mu_product"] = entry["mu_product"].cpu()
