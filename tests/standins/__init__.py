# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Stand-ins on CPUs for libraries that need a GPU, with the behavior that the package has to know."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW that keeps its books as Transformer Engine's FusedAdam does.

    Steps are counted per parameter group, as a Python number, for groups with parameters. Every name in the state has a
    type in `name_to_dtype_map`: saving and loading look it up and fail on other names. The first two moments are made
    at the first step of a parameter whose state is empty.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        capturable: bool = False,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.name_to_dtype_map = dict.fromkeys(("exp_avg", "exp_avg_sq", "master_param"), torch.float32)

    def _checked(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.name_to_dtype_map[name]) for name, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["state"] = {key: self._checked(state) for key, state in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            self.state[param] = self._checked(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                if param.grad is None:
                    continue
                average, square = state["exp_avg"], state["exp_avg_sq"]
                average.lerp_(param.grad, 1 - first)
                square.mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                root = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.addcdiv_(average, root, value=-group["lr"] / (1 - first ** group["step"]))


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


class FusedWeightGradient:
    """Apex's fused_weight_gradient_mlp_cuda: adds the weight gradient of a linear layer to a buffer, in place."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.add_(grad_output.t().matmul(inputs))
