# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Settings of a process that trains on CPUs, and the arguments that go with them."""

import ctypes
import logging
import os
import warnings
from typing import Any

# mallopt(3): parameter numbers, and the largest values that glibc takes on 64 bits.
_M_TRIM_THRESHOLD, _LARGEST_INT = -1, 2**31 - 1
_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -3, 32 * 2**20


def prepare() -> None:
    """Set up this process before Megatron is imported. A second call changes nothing."""
    _keep_freed_memory()
    # Megatron compiles small functions with torch.compile, whose first call looks for an accelerator.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns that there is no CUDA
    # One generator serves as the CPU's and the GPU's, so the RNG tracker always warns about a mix-up.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")


def _keep_freed_memory() -> None:
    """Let the C library keep freed memory, as the caching allocator does on GPUs.

    Gradients are allocated and freed in every micro-batch. Mapping and clearing their pages anew took 4 % of a small
    model's batch. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


WITHOUT_FUSED_KERNELS: dict[str, bool] = {
    "persist_layer_norm": False,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
}
"""Arguments of a model that torch's own operations compute."""

DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    **WITHOUT_FUSED_KERNELS,
    "use_gloo_process_groups": False,  # every group is a gloo group already
    # bf16 products are emulated on CPUs: slower, and less exact.
    **{f"{name}_fp32_matmul_prec": "highest" for name in ("muon", "normuon", "adamuon", "mars_m", "soap")},
    "num_workers": 0,  # loader processes would compete for the cores
}
"""Defaults of arguments on CPUs. The contract of options refuses other values of those that need a GPU."""
