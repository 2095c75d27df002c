# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A stand-in for Transformer Engine that computes in torch, for Megatron's wrappers around its layers.

They keep what a delayed schedule has to know of Transformer Engine 2.6, the oldest version that the package takes:

- A layer wraps its parameters anew after their initialization.
- A linear layer saves the Parameter itself for backward.
- Its backward adds the weight gradient to `main_grad`, and returns a gradient that nobody may add.
- Its backward overwrites `main_grad` after a forward with `is_first_microbatch`.

`pytorch.module.MAIN_GRAD_AT_FORWARD` takes `main_grad` in the forward, as versions before 2.6 do.
"""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.6.0"
