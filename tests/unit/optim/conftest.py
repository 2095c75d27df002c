# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    """One seed, full fp32 products, and no compiler: some of emerging-optimizers' functions ask for it."""
    precision = torch.get_float32_matmul_precision()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")
    with torch.compiler.set_stance("force_eager"):
        yield
    torch.set_float32_matmul_precision(precision)
