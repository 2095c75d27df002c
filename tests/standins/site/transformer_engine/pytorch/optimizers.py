# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.standins import FusedAdam as FusedAdam

FusedSGD = torch.optim.SGD


def multi_tensor_applier(operation: Callable[..., Any], overflow: Tensor, lists: Sequence[Any], *args: Any) -> Any:
    return operation(overflow, lists, *args)


def multi_tensor_scale(overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    sources, destinations = lists
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source).mul_(scale)


def multi_tensor_l2norm(overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    assert not per_tensor
    return torch.stack([part.float().norm() for part in lists[0]]).norm(), None
