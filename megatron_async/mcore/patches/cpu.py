# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Patches that let Megatron-Core run on CPUs over gloo.

Megatron-Core names CUDA in many places although little of it needs a GPU. `torch.cuda.is_available()` stays False:
torch's own optimizers ask for an accelerator stream otherwise.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_async.mcore.patches import gloo
from megatron_async.mcore.patches.patch import Patch

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """`device="cuda"` means the CPU."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = _CPU
        return original(*args, **kwargs)

    return wrapper


def _returns_self(original: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self


def _returns(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: lambda *args, **kwargs: value


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return wrapper


def _without_device_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return wrapper


def _split_sizes_as_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def wrapper(
        output: Any,
        input: Any,
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


class _Event(torch.cpu.Event):
    """Stands in for `torch.cuda.Event`: all earlier work on a CPU is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _Stream(torch.cpu.Stream):
    """Stands in for `torch.cuda.Stream`: CPU kernels run in program order, so all streams are one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: Any = None) -> _Event:  # type: ignore[override]
        return _Event()

    def synchronize(self) -> None:
        pass


def _set_rng_state(original: Any) -> Callable[..., None]:
    return lambda new_state, *args, **kwargs: torch.set_rng_state(new_state)


def _get_rng_state(original: Any) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: torch.get_rng_state()


def _manual_seed(original: Any) -> Callable[[int], Any]:
    return lambda seed: torch.default_generator.manual_seed(int(seed))


_cpu_patch = functools.partial(Patch, devices=("cpu",))

PATCHES: tuple[Patch, ...] = (
    *(
        _cpu_patch(
            f"torch:{name}",
            "tensors are made with device='cuda'",
            "core/optimizer/clip_grads.py: torch.zeros(1, dtype=torch.float, device='cuda')",
            _on_cpu,
        )
        for name in _FACTORIES
    ),
    _cpu_patch(
        "torch:Tensor.cuda",
        "tensors are moved with .cuda()",
        "core/models/common/embeddings/rope_utils.py: .cuda(non_blocking=True)",
        _returns_self,
    ),
    _cpu_patch(
        "torch.nn:Module.cuda",
        "the model is moved with .cuda(device)",
        "training/models/dist_utils.py: .cuda(torch.cuda.current_device())",
        _returns_self,
    ),
    _cpu_patch(
        "torch:Tensor.type",
        "optimizers and clipping compare type names with torch.cuda.*Tensor",
        "core/optimizer/clip_grads.py: assert param.grad.type() == 'torch.cuda.FloatTensor'",
        _cuda_type_name,
    ),
    _cpu_patch(
        "torch.cuda:current_device",
        "tensors are made on the current CUDA device",
        "core/transformer/dot_product_attention.py: device=torch.cuda.current_device()",
        _returns(_CPU),
    ),
    _cpu_patch(
        "torch.cuda:get_device_capability",
        "--moe-grouped-gemm is checked against the GPU; local experts on CPUs ignore it",
        "training/arguments.py: dc = torch.cuda.get_device_capability()",
        _returns((8, 0)),
    ),
    _cpu_patch(
        "megatron.training.arguments:get_device_arch_version",
        "tensor and expert parallelism are checked against the GPU's generation; 8 allows every feature",
        "training/arguments.py: get_device_arch_version()",
        _returns(8),
    ),
    _cpu_patch(
        "torch.cuda:synchronize", "timers synchronize", "core/timers.py: torch.cuda.synchronize()", _returns(None)
    ),
    _cpu_patch(
        "torch.cuda:current_stream",
        "gradient reduction orders itself after the compute stream",
        "core/distributed/param_and_grad_buffer.py: current_stream = torch.cuda.current_stream()",
        _returns(_Stream()),
    ),
    _cpu_patch(
        "torch.cuda:Stream",
        "shared experts make side streams",
        "core/transformer/moe/shared_experts.py: torch.cuda.Stream()",
        lambda original: _Stream,
    ),
    _cpu_patch(
        "torch.cuda:Event",
        "the token dispatcher orders streams by events",
        "core/transformer/moe/token_dispatcher.py: self.d2h_event",
        lambda original: _Event,
    ),
    _cpu_patch(
        "torch.cuda:stream",
        "shared experts compute on side streams",
        "core/transformer/moe/shared_experts.py: with torch.cuda.stream(",
        lambda original: contextlib.nullcontext,
    ),
    *(
        _cpu_patch(
            f"torch.cuda.nvtx:{name}",
            "profiler ranges call into the CUDA tools extension",
            f"core/utils.py: torch.cuda.nvtx.{name}(",
            _returns(None),
        )
        for name in ("range_push", "range_pop")
    ),
    _cpu_patch(
        "torch.cuda:get_rng_state",
        "the RNG tracker keeps CUDA generator states",
        "core/tensor_parallel/random.py: orig_rng_state = torch.cuda.get_rng_state()",
        _get_rng_state,
    ),
    _cpu_patch(
        "torch.cuda:set_rng_state",
        "checkpoints restore the CUDA generator state",
        "training/checkpointing.py: torch.cuda.set_rng_state",
        _set_rng_state,
    ),
    _cpu_patch(
        "torch.cuda:manual_seed",
        "the RNG tracker seeds the CUDA generator",
        "core/tensor_parallel/random.py: torch.cuda.manual_seed(seed)",
        _manual_seed,
    ),
    _cpu_patch(
        "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
        "the RNG tracker reads the CUDA generator",
        "core/tensor_parallel/random.py: def _get_cuda_rng_state(",
        _get_rng_state,
    ),
    _cpu_patch(
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        "the RNG tracker writes the CUDA generator",
        "core/tensor_parallel/random.py: def _set_cuda_rng_state(",
        _set_rng_state,
    ),
    _cpu_patch(
        "megatron.core.ssm.gated_delta_net.common:HAVE_FLA",
        "Gated DeltaNet insists on kernels that need a GPU; ours computes in torch",
        "core/ssm/gated_delta_net/common.py: if not HAVE_FLA:",
        lambda original: True,
    ),
    _cpu_patch(
        "torch.distributed:barrier",
        "gloo refuses device_ids",
        "core/parallel_state.py: device_ids=[torch.cuda.current_device()],",
        _without_device_ids,
    ),
    _cpu_patch(
        "torch.distributed:all_to_all_single",
        "the token dispatcher passes split sizes as tensors; gloo takes lists",
        "core/tensor_parallel/mappings.py: output_split_sizes=output_split_sizes,",
        _split_sizes_as_lists,
    ),
    _cpu_patch(
        "torch.distributed:all_gather",
        "the layer-wise optimizer gathers shards of different sizes; gloo takes equal ones",
        "core/optimizer/layer_wise_optimizer.py: torch.distributed.all_gather(gather_list, src, group=group)",
        _uneven_shards_by_broadcast,
    ),
    _cpu_patch(
        "torch.distributed.distributed_c10d:ProcessGroupGloo",
        "each of Megatron's many groups has a thread that wakes up a hundred times a second",
        "core/parallel_state.py: def create_group(",
        gloo.sharing_threads,
    ),
)
