# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Megatron-Core on CPUs over gloo.

Megatron-Core names CUDA in many places although little of it needs a GPU. Each `Patch` below replaces one name,
says why, and quotes the Megatron line that it answers; a test looks every quoted line up in the installed wheel,
so that a patch nobody needs any more is noticed. Nothing here is imported on a GPU machine.

`torch.cuda.is_available()` stays False on purpose: torch's own optimizers ask for an accelerator stream otherwise.
"""

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_async.platform import gloo

CPU = torch.device("cpu")
_INSTALLED = "_megatron_async_cpu_patches"


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced name.

    Attributes:
        target: dotted name, `module:attribute[.attribute]`.
        reason: why a CPU process needs it.
        answers: `file: text`, a Megatron file below `megatron/` and a text found in it; empty where torch itself
            is the reason.
        replace: maps the original object to its replacement.
    """

    target: str
    reason: str
    answers: str
    replace: Callable[[Any], Any]

    def locate(self) -> tuple[Any, str]:
        """Return the object that owns the attribute, and the attribute's name."""
        module, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _device_argument_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """`device="cuda"` means the CPU; also for the first positional argument of `Tensor.to` and `Module.to`."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if any(_is_cuda(argument) for argument in args):
            args = tuple(CPU if _is_cuda(argument) else argument for argument in args)
        return original(*args, **kwargs)

    return wrapper


def _returns_self(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return wrapper


def _constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: functools.wraps(original)(lambda *args, **kwargs: value)


def _calls(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: functools.wraps(original)(function)


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and result.startswith("torch.") and result.count(".") == 1:
            return result.replace("torch.", "torch.cuda.")
        return result

    return wrapper


def _without(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for name in names:
                kwargs.pop(name, None)
            return original(*args, **kwargs)

        return wrapper

    return replace


def _split_sizes_as_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def wrapper(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(output, input, as_list(output_split_sizes), as_list(input_split_sizes), *args, **kwargs)

    return wrapper


def _uneven_shards_by_broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({part.numel() for part in tensor_list}) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        for index, rank in enumerate(torch.distributed.get_process_group_ranks(group)):
            if tensor_list[index].numel():
                torch.distributed.broadcast(tensor_list[index], src=rank, group=group)
        return None

    return wrapper


class _Event:
    """Stands in for `torch.cuda.Event`: whatever came before it on a CPU is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Stream:
    """Stands in for `torch.cuda.Stream`: CPU kernels run in program order, so all streams are one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def _no_stream_switch(stream: Any = None) -> Iterator[None]:
    yield


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "arange",
    "empty_like",
    "zeros_like",
)

PATCHES: tuple[Patch, ...] = (
    *(
        Patch(
            f"torch:{name}",
            "tensors are made with device='cuda'",
            "core/optimizer/clip_grads.py: torch.zeros(1, dtype=torch.float, device='cuda')",
            _device_argument_on_cpu,
        )
        for name in _FACTORIES
    ),
    Patch(
        "torch:Tensor.to",
        "tensors are moved with .to(device='cuda')",
        "core/models/common/embeddings/rotary_pos_embedding.py: .to(device=torch.cuda.current_device())",
        _device_argument_on_cpu,
    ),
    Patch(
        "torch.nn:Module.to",
        "modules are moved with .to(cuda device)",
        "core/transformer/torch_layer_norm.py: torch",
        _device_argument_on_cpu,
    ),
    Patch(
        "torch:Tensor.cuda",
        "tensors are moved with .cuda()",
        "core/models/common/embeddings/rope_utils.py: .cuda(non_blocking=True)",
        _returns_self,
    ),
    Patch(
        "torch.nn:Module.cuda",
        "the model is moved with .cuda(current_device)",
        "training/models/dist_utils.py: .cuda(torch.cuda.current_device())",
        _returns_self,
    ),
    Patch(
        "torch:Tensor.type",
        "the optimizers and the clipping compare type names with torch.cuda.*Tensor",
        "core/optimizer/clip_grads.py: assert param.grad.type() == 'torch.cuda.FloatTensor'",
        _cuda_type_name,
    ),
    Patch(
        "torch.cuda:current_device",
        "tensors are made on torch.cuda.current_device()",
        "core/transformer/dot_product_attention.py: device=torch.cuda.current_device()",
        _constant(CPU),
    ),
    Patch(
        "torch.cuda:get_device_capability",
        "--moe-grouped-gemm is checked against the GPU; on CPUs the experts of the local modules ignore it",
        "training/arguments.py: dc = torch.cuda.get_device_capability()",
        _constant((8, 0)),
    ),
    Patch(
        "megatron.training.arguments:get_device_arch_version",
        "tensor and expert parallelism are checked against the GPU's generation; 8 leaves every feature on",
        "training/arguments.py: get_device_arch_version()",
        _constant(8),
    ),
    Patch(
        "torch.cuda:synchronize",
        "the timers synchronize the device",
        "core/timers.py: torch.cuda.synchronize()",
        _constant(None),
    ),
    Patch(
        "torch.cuda:current_stream",
        "gradient reduction orders itself after the compute stream",
        "core/distributed/param_and_grad_buffer.py: current_stream = torch.cuda.current_stream()",
        _constant(_Stream()),
    ),
    Patch(
        "torch.cuda:Stream",
        "shared experts and optimizers make side streams",
        "core/transformer/moe/shared_experts.py: torch.cuda.Stream()",
        lambda original: _Stream,
    ),
    Patch(
        "torch.cuda:Event",
        "the shared expert and the dispatcher order streams by events",
        "core/transformer/moe/token_dispatcher.py: self.d2h_event",
        lambda original: _Event,
    ),
    Patch(
        "torch.cuda:stream",
        "work is issued on side streams",
        "core/transformer/moe/shared_experts.py: with torch.cuda.stream(",
        _calls(_no_stream_switch),
    ),
    Patch(
        "torch.cuda.nvtx:range_push",
        "profiler ranges call into the CUDA tools extension",
        "core/utils.py: torch.cuda.nvtx.range_push(msg)",
        _constant(None),
    ),
    Patch(
        "torch.cuda.nvtx:range_pop",
        "profiler ranges call into the CUDA tools extension",
        "core/utils.py: torch.cuda.nvtx.range_pop()",
        _constant(None),
    ),
    Patch(
        "torch.cuda:get_rng_state",
        "the random state tracker keeps CUDA generator states",
        "core/tensor_parallel/random.py: orig_rng_state = torch.cuda.get_rng_state()",
        _calls(_get_rng_state),
    ),
    Patch(
        "torch.cuda:set_rng_state",
        "checkpoints restore the CUDA generator state",
        "training/checkpointing.py: torch.cuda.set_rng_state",
        _calls(_set_rng_state),
    ),
    Patch(
        "torch.cuda:manual_seed",
        "the random state tracker seeds the CUDA generator",
        "core/tensor_parallel/random.py: torch.cuda.manual_seed(seed)",
        _calls(_manual_seed),
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        "the random state tracker reads the CUDA generator",
        "core/tensor_parallel/random.py: def _get_cuda_rng_state(",
        _calls(_get_rng_state),
    ),
    Patch(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        "the random state tracker writes the CUDA generator",
        "core/tensor_parallel/random.py: def _set_cuda_rng_state(",
        _calls(_set_rng_state),
    ),
    Patch(
        "megatron.core.ssm.gated_delta_net.common:HAVE_FLA",
        "the layer insists on flash-linear-attention, whose kernels need a GPU; ours computes in torch",
        "core/ssm/gated_delta_net/common.py: if not HAVE_FLA:",
        lambda original: True,
    ),
    Patch(
        "torch.distributed:barrier",
        "gloo refuses device_ids",
        "core/parallel_state.py: device_ids=[torch.cuda.current_device()],",
        _without("device_ids"),
    ),
    Patch(
        "torch.distributed:all_to_all_single",
        "the token dispatcher passes split sizes as tensors; gloo takes lists",
        "core/tensor_parallel/mappings.py: output_split_sizes=output_split_sizes,",
        _split_sizes_as_lists,
    ),
    Patch(
        "torch.distributed:all_gather",
        "the layer-wise optimizer gathers shards of different sizes; gloo takes equal ones",
        "core/optimizer/layer_wise_optimizer.py: torch.distributed.all_gather(gather_list, src, group=group)",
        _uneven_shards_by_broadcast,
    ),
    Patch(
        "torch.distributed.distributed_c10d:ProcessGroupGloo",
        "each of Megatron's many groups has a thread that wakes up a hundred times a second",
        "core/parallel_state.py: def create_group(",
        gloo.sharing_threads,
    ),
)


# mallopt(3): parameter numbers, and the largest values that glibc takes on 64 bits.
_M_TRIM_THRESHOLD, _LARGEST_INT = -1, 2**31 - 1
_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -3, 32 * 2**20


def _keep_freed_memory() -> None:
    """Let the C library keep what tensors have freed, as the caching allocator does on GPUs.

    Gradients are made and freed in every micro-batch. Given back to the system, their pages are mapped and cleared
    anew each time, which took 4 % of a small model's batch. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)


def install() -> None:
    """Apply every patch to this process, once."""
    if hasattr(torch, _INSTALLED):
        return
    _keep_freed_memory()
    # Megatron compiles small functions with torch.compile, whose first call looks for an accelerator.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns that there is no CUDA
    for patch in PATCHES:
        owner, name = patch.locate()
        setattr(owner, name, patch.replace(getattr(owner, name)))
    # One generator is both the CPU's and the "GPU's" here, so the tracker's check for a mix-up always fires.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
    setattr(torch, _INSTALLED, True)


# Arguments a CPU run chooses by itself, so that users need not know them: (argparse destination, value, reason).
ARGUMENTS: tuple[tuple[str, Any, str], ...] = (
    ("distributed_backend", "gloo", "NCCL needs GPUs"),
    ("transformer_impl", "local", "Transformer Engine needs a GPU"),
    ("persist_layer_norm", False, "fused kernel"),
    ("no_persist_layer_norm", True, "fused kernel"),
    ("masked_softmax_fusion", False, "fused kernel"),
    ("bias_gelu_fusion", False, "fused kernel"),
    ("bias_swiglu_fusion", False, "fused kernel"),
    ("bias_dropout_fusion", False, "fused kernel"),
    ("apply_rope_fusion", False, "fused kernel"),
    ("gradient_accumulation_fusion", False, "fused kernel"),
    ("cross_entropy_loss_fusion", False, "fused kernel"),
    ("use_gloo_process_groups", False, "every group is a gloo group already"),
)


# Defaults of a CPU run that a user may change: (argparse destination, value, reason).
DEFAULTS: tuple[tuple[str, Any, str], ...] = (
    *(
        (f"{name}_fp32_matmul_prec", "highest", "bf16 products are emulated on CPUs: slower, and less exact")
        for name in ("muon", "normuon", "adamuon", "mars_m", "soap")
    ),
    ("num_workers", 0, "loader processes would take the cores that compute"),
)
