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
from torch.distributed import ReduceOp

from megatron_async.mcore.patches import gloo
from megatron_async.mcore.patches.patch import Patch

_CPU = torch.device("cpu")
# Functions that are called with device="cuda", and a file that does so.
_FACTORIES = {
    "tensor": "core/optimizer/grad_scaler.py",
    "zeros": "core/optimizer/clip_grads.py",
    "ones": "core/transformer/utils.py",
    "empty": "core/dist_checkpointing/exchange_utils.py",
    "empty_like": "core/dist_checkpointing/exchange_utils.py",
}


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
        tensor_list[torch.distributed.get_rank(group)].copy_(tensor)
        for index, rank in enumerate(torch.distributed.get_process_group_ranks(group)):
            if tensor_list[index].numel():
                torch.distributed.broadcast(tensor_list[index], src=rank, group=group)
        return None

    return wrapper


def _uneven_shards_by_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(
        output: torch.Tensor, input_list: list[torch.Tensor], op: Any = ReduceOp.SUM, group: Any = None, **kwargs: Any
    ) -> Any:
        if len({part.numel() for part in input_list}) == 1:
            return original(output, input_list, op=op, group=group, **kwargs)
        parts = [part.clone() for part in input_list]  # a reduction changes its input
        for part, rank in zip(parts, torch.distributed.get_process_group_ranks(group), strict=True):
            if part.numel():
                torch.distributed.reduce(part, dst=rank, op=op, group=group)
        output.copy_(parts[torch.distributed.get_rank(group)])
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


def _because(reason: str, *rows: tuple[str, str, Callable[[Any], Any]]) -> tuple[Patch, ...]:
    """Patches with one reason, from (target, line of Megatron that it answers, replacement)."""
    return tuple(Patch(target, reason, answers, replace, ("cpu",)) for target, answers, replace in rows)


def _does_not_compile(original: Any) -> Callable[..., Any]:
    return lambda model=None, **kwargs: model if model is not None else lambda function: function


PATCHES: tuple[Patch, ...] = (
    *_because(
        "TORCHDYNAMO_DISABLE leaves functions as they are, but decorating one imports the whole compiler",
        ("torch:compile", "core/jit.py: jit_fuser = torch.compile", _does_not_compile),
    ),
    *_because(
        "tensors and modules are made on CUDA devices, or moved there",
        *((f"torch:{name}", f"{file}: torch.{name}(", _on_cpu) for name, file in _FACTORIES.items()),
        ("torch:Tensor.cuda", "core/models/common/embeddings/rope_utils.py: .cuda(non_blocking=True)", _returns_self),
        ("torch.nn:Module.cuda", "training/models/dist_utils.py: .cuda(torch.cuda.current_device())", _returns_self),
        (
            "torch.cuda:current_device",
            "core/transformer/dot_product_attention.py: device=torch.cuda.current_device()",
            _returns(_CPU),
        ),
    ),
    *_because(
        "optimizers and clipping compare type names with torch.cuda.*Tensor",
        (
            "torch:Tensor.type",
            "core/optimizer/clip_grads.py: assert param.grad.type() == 'torch.cuda.FloatTensor'",
            _cuda_type_name,
        ),
    ),
    *_because(
        "features are checked against the generation of the GPU; 8 allows all that this package supports",
        (
            "torch.cuda:get_device_capability",
            "training/arguments.py: dc = torch.cuda.get_device_capability()",
            _returns((8, 0)),
        ),
        (
            "megatron.training.arguments:get_device_arch_version",
            "training/arguments.py: get_device_arch_version()",
            _returns(8),
        ),
    ),
    *_because(
        "work is ordered by streams and events; CPU kernels run in program order",
        ("torch.cuda:synchronize", "core/timers.py: torch.cuda.synchronize()", _returns(None)),
        (
            "torch.cuda:current_stream",
            "core/distributed/param_and_grad_buffer.py: current_stream = torch.cuda.current_stream()",
            _returns(_Stream()),
        ),
        (
            "torch.cuda:Stream",
            "core/transformer/moe/shared_experts.py: torch.cuda.Stream()",
            lambda original: _Stream,
        ),
        ("torch.cuda:Event", "core/transformer/moe/token_dispatcher.py: self.d2h_event", lambda original: _Event),
        (
            "torch.cuda:stream",
            "core/transformer/moe/shared_experts.py: with torch.cuda.stream(",
            lambda original: contextlib.nullcontext,
        ),
    ),
    *_because(
        "the RNG tracker and checkpoints keep states of the CUDA generator",
        (
            "torch.cuda:get_rng_state",
            "core/tensor_parallel/random.py: orig_rng_state = torch.cuda.get_rng_state()",
            _get_rng_state,
        ),
        ("torch.cuda:set_rng_state", "training/checkpointing.py: torch.cuda.set_rng_state", _set_rng_state),
        ("torch.cuda:manual_seed", "core/tensor_parallel/random.py: torch.cuda.manual_seed(seed)", _manual_seed),
        *(
            (f"megatron.core.tensor_parallel.random:{name}", f"core/tensor_parallel/random.py: def {name}(", replace)
            for name, replace in (("_get_cuda_rng_state", _get_rng_state), ("_set_cuda_rng_state", _set_rng_state))
        ),
    ),
    *_because(
        "gloo refuses device_ids, split sizes that are tensors, and shards of different sizes",
        ("torch.distributed:barrier", "core/parallel_state.py: device_ids=[torch", _without_device_ids),
        (
            "torch.distributed:all_to_all_single",
            "core/tensor_parallel/mappings.py: output_split_sizes=output_split_sizes,",
            _split_sizes_as_lists,
        ),
        (
            "torch.distributed:all_gather",
            "core/optimizer/layer_wise_optimizer.py: torch.distributed.all_gather(gather_list, src, group=group)",
            _uneven_shards_by_broadcast,
        ),
        (
            "torch.distributed:reduce_scatter",
            "core/tensor_parallel/mappings.py: torch.distributed.reduce_scatter(",
            _uneven_shards_by_reduce,
        ),
    ),
    *_because(
        "each of Megatron's many groups has a thread that wakes up a hundred times a second",
        (
            "torch.distributed.distributed_c10d:ProcessGroupGloo",
            "core/parallel_state.py: def create_group(",
            gloo.sharing_threads,
        ),
    ),
)
