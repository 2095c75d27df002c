# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Times of each kind of layer on the real device, for `--pipeline-balance measured`, and a device's own description."""

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_async.mcore.model import build_model, layers_of_gpt_layer
from megatron_async.mcore.parallel import device, first_rank
from megatron_async.mcore.patches import temporary
from megatron_async.mcore.rng import fork_rng
from megatron_async.models import gpt, hybrid
from megatron_async.optim import corrections, options, registry
from megatron_async.optim.step import MasterStep, StepContext, parts
from megatron_async.planning import balance, devices
from megatron_async.planning.costs import CostModel
from megatron_async.planning.devices import Device
from megatron_async.planning.parameters import Parameter, blocks
from megatron_async.planning.resolve import step_values
from megatron_async.planning.timing import BlockTime

SECONDS = 3.0
_LEAST_ROUNDS = 5


def block_times(args: argparse.Namespace, seconds: float = SECONDS) -> list[BlockTime]:
    """Time every block of the model of checked arguments on this rank's device; collectives are estimated.

    The layers of a short model are timed one by one; embedding and head by the rest of the whole model's time; updates
    on random weights. Must not be called where torch.distributed is in use.
    """
    model = blocks(args)
    layers = [own.alike for own in model[1:-1]]  # layers with parameters of the same shapes take the same time
    length = max(layers.index(kind) for kind in set(layers)) + 1
    short = hybrid.on_one_stage(args)
    short.num_layers, short.recompute_granularity = length, None
    if args.hybrid_layer_pattern is not None:
        short.hybrid_layer_pattern = short.hybrid_layer_pattern[:length]
    if isinstance(args.moe_layer_freq, list):
        short.moe_layer_freq = args.moe_layer_freq[:length]
    tensor, experts = args.tensor_model_parallel_size, args.expert_model_parallel_size
    short.world_size = math.lcm(tensor, experts * (args.expert_tensor_parallel_size or 1))
    with fork_rng(), temporary.ROUTER_LOSS_SCALE.replaced(lambda scale: None), first_rank(short):
        ends, by_kind = _measure(short, layers[:length], seconds)
    estimated, recomputes = CostModel(args, devices.find(args.plan_device)), args.recompute_granularity == "full"
    found, updates = [], estimated.updates(model, partial(_update, args))
    for number, own in enumerate([ends[0], *(by_kind[kind] for kind in layers), ends[1]]):
        layer = 0 < number < len(model) - 1
        collectives = estimated.collectives(model[number])
        forward = own[0] + collectives
        backward = own[1] + collectives + (forward if recomputes and layer else 0.0)
        found.append(BlockTime(forward, backward, update=updates[number]))
    return found


def _measure(
    args: argparse.Namespace, kinds: Sequence[Hashable], seconds: float
) -> tuple[tuple[tuple[float, float], tuple[float, float]], dict[Hashable, tuple[float, float]]]:
    """Median time of forward and backward: of embedding and head, and of each kind of layer.

    Plans of CPU runs were 6 to 16 % too short with the least times, and are 4 to 9 % with these.
    """
    config = gpt.model_config(args)
    config.transformer.gradient_accumulation_fusion = False  # needs the gradient buffers of a run
    model: Any = build_model(config, ProcessGroupCollection.use_mpu_process_groups(), None).to(device())
    if args.bf16 or args.fp16:
        model = model.bfloat16()
    shape = args.micro_batch_size, args.seq_length
    tokens = torch.randint(0, args.vocab_size or args.padded_vocab_size, shape, device=device())
    positions = torch.arange(args.seq_length, device=device()).expand(shape)

    def whole() -> Any:
        return model(tokens, positions, None, labels=tokens)

    halves = range(layers_of_gpt_layer(model.config))
    layers = batched(model.decoder.layers, len(halves))
    parts: dict[Any, Any] = {(kind, i): own[i] for kind, own in zip(kinds, layers, strict=True) for i in halves}
    parts["embedding"] = model.embedding
    inputs: dict[Any, tuple[Any, Any]] = {}
    hooks = [
        module.register_forward_pre_hook(_record(inputs, name), with_kwargs=True) for name, module in parts.items()
    ]
    whole()
    for hook in hooks:
        hook.remove()
    calls = {"whole": whole} | {name: _replayed(module, *inputs[name]) for name, module in parts.items()}
    times: dict[Any, list[tuple[float, float]]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < _LEAST_ROUNDS + 1 or time.perf_counter() < end:
        for name, call in calls.items():
            spent = _time(call)
            if rounds:  # the first round allocates and compiles
                times[name].append(spent)
        model.zero_grad(set_to_none=True)
        rounds += 1
    usual = {name: tuple(map(statistics.median, zip(*rows, strict=True))) for name, rows in times.items()}
    usual |= {kind: tuple(sum(usual[kind, i][way] for i in halves) for way in range(2)) for kind in set(kinds)}
    known = [usual["embedding"], *(usual[kind] for kind in kinds)]
    head = tuple(max(0.0, usual["whole"][i] - sum(own[i] for own in known)) for i in range(2))
    return (usual["embedding"], head), {kind: usual[kind] for kind in set(kinds)}  # type: ignore[return-value]


def _record(inputs: dict[Any, tuple[Any, Any]], name: Any) -> Callable[..., None]:
    def hook(module: Any, args: Any, kwargs: Any) -> None:
        inputs[name] = args, kwargs

    return hook


def _replayed(module: Any, args: Any, kwargs: Any) -> Callable[[], Any]:
    """A call of a module with recorded inputs, whose backward ends at them."""

    def fresh(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad
        return value.detach().requires_grad_() if floating else value

    def call() -> Any:
        output = module(*map(fresh, args), **{key: fresh(value) for key, value in kwargs.items()})
        return output[0] if isinstance(output, tuple) else output

    return call


def _time(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of the forward and of the backward of a call."""
    start = _now()
    output = call()
    middle = _now()
    output.backward(torch.ones_like(output))
    return middle - start, _now() - middle


def _now() -> float:
    """Seconds; of one thread on a CPU only while it computes, since other processes may take their turns."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def _update(args: argparse.Namespace, parameters: Sequence[Parameter]) -> float:
    """Least time of one batch's update of parameters: norm, next weight version, step, gradients of the next batch."""
    groups: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
    chosen = options.assignment(args)
    for own in parameters:
        name = chosen[own.role]
        shapes = own.matrices if registry.find(name).scope == "matrix" else (own.shape,)
        made = (torch.randn(shape, device=device()) for _ in range(own.number) for shape in shapes)
        groups[name] += map(torch.nn.Parameter, made)
    optimizers = [registry.find(name).build(own, **vars(step_values(args, name))) for name, own in groups.items()]
    weights = [weight for own in groups.values() for weight in own]
    gradients, copies = (list(map(make, weights)) for make in (torch.randn_like, torch.empty_like))
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    step = MasterStep(optimizers, parts(correction=corrections.make(args.staleness_correction, 1.0, optimizers)))

    def update() -> None:
        with torch.no_grad():
            torch.nn.utils.get_total_norm(gradients)
            torch._foreach_copy_(copies, list(weights))
            step(StepContext(0, clip_factor=0.9, corrected=True))
            torch._foreach_zero_(copies)

    return _fastest(update) if weights else 0.0


class Measured:
    """Times of a run's blocks on this rank, taken before its process groups exist."""

    def __init__(self, args: argparse.Namespace) -> None:
        known = balance.with_vocabulary(args)
        self._args, self._model, self._times = args, blocks(known), block_times(known)

    def settle(self) -> None:
        """Split the layers by the mean over all ranks, so that every rank chooses the same split. Collective."""
        rows = [[own.forward, own.backward, own.update] for own in self._times]
        values = torch.tensor(rows, dtype=torch.float64).to(device())
        dist.all_reduce(values)
        mean = (values / dist.get_world_size()).tolist()
        times = [BlockTime(forward, backward, update=update) for forward, backward, update in mean]
        balance.settle(self._args, devices.find(self._args.plan_device), self._model, times)


def device_of_this_machine(name: str) -> Device:
    """This machine's device: matrices, copies and memory are measured, links and launches those of a known device."""
    on_gpu = device().type == "cuda"
    known = devices.find(devices.DEFAULT if on_gpu else "cpu")
    size = 8192 if on_gpu else 1024
    speeds = {}
    for precision, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        left, right = (torch.randn(size, size, device=device(), dtype=dtype) for _ in range(2))
        speeds[precision] = 2 * size**3 / _fastest(partial(torch.matmul, left, right))
    source = torch.randn(1 << 26, device=device())
    copied = 8 * source.numel() / _fastest(source.clone)
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if on_gpu else known.memory_gib
    what = torch.cuda.get_device_name(0) if on_gpu else f"CPU with {torch.get_num_threads()} thread(s)"
    return replace(
        known,
        name=name,
        description=what,
        source=f"products of {size} x {size} matrices and copies, measured; links and launches of {known.name}",
        efficiency_source=f"that of {known.name}",
        flops=speeds,
        memory_gib=memory,
        memory_bandwidth=copied,
    )


def _fastest(call: Callable[[], Any], rounds: int = 5) -> float:
    best = math.inf
    for _ in range(rounds):
        start = _now()
        call()
        best = min(best, _now() - start)
    return best
