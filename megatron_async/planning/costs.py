# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Time of every block of a model for one micro-batch on a device, and of what stages exchange: estimates from FLOPs,
bytes and launches."""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_async.models import hybrid
from megatron_async.optim import options
from megatron_async.planning.devices import Device
from megatron_async.planning.parameters import SUBLAYERS, Block, Parameter, on_stages
from megatron_async.planning.resolve import keeps_scores, precision_of, step_values, width_of
from megatron_async.planning.timing import BlockTime, Exchange

LAUNCHES = {
    "attention": 15,
    "linear_attention": 45,
    "mamba": 30,
    "feed_forward": 15,
    "experts": 75,
    "end": 10,
}
"""Kernel launches of a forward, assumed: of each sublayer with its norm; of embedding or head. A backward has twice as
many."""
_REDUCED = ("embedding", *SUBLAYERS, "head")
"""Kinds of parameters of sublayers that end with a collective of tensor parallelism."""
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank would step on if it held a whole model, apart from or of its experts.

    Attributes:
        numbers: of parameters.
        seconds: of matrix products and of gathers over tensor-parallel ranks.
    """

    numbers: int
    seconds: float


class CostModel:
    """Costs of a run's arguments on a device."""

    def __init__(self, args: argparse.Namespace, device: Device) -> None:
        self._args, self._device = args, device
        self._width, self._tokens = width_of(args), args.micro_batch_size * args.seq_length

    def flops(self, model: Sequence[Block]) -> list[float]:
        """Forward FLOPs of each block for one micro-batch on one rank."""
        args, tied = self._args, [own for own in model[0].parameters if "word_embeddings" in own.name]
        found = []
        for number, block in enumerate(model):
            matrices = sum(map(self._multiplied, block.parameters))
            if number == len(model) - 1 and not args.untie_embeddings_and_output_weights:
                matrices += sum(math.prod(own.shape) for own in tied)
            layer = 0 < number < len(model) - 1
            found.append(self._tokens * (2 * matrices + (self._attention(block) if layer else 0)))
        return found

    def blocks(self, model: Sequence[Block]) -> list[BlockTime]:
        """Time of each block of `parameters.blocks`."""
        speed = self._device.speed(precision_of(self._args))
        recomputes = self._args.recompute_granularity == "full"
        found = []
        for number, (block, flops) in enumerate(zip(model, self.flops(model), strict=True)):
            layer = 0 < number < len(model) - 1
            collectives = self.collectives(block)
            launches = sum(number for kind, number in LAUNCHES.items() if block.has(kind)) if layer else LAUNCHES["end"]
            forward = flops / speed + collectives
            again = recomputes and layer
            backward = 2 * flops / speed + collectives + (forward if again else 0.0)
            found.append(BlockTime(forward, backward, (4 if again else 3) * launches * self._device.launch_seconds))
        return found

    def work(self, model: Sequence[Block]) -> tuple[Work, Work]:
        """Work of a step, without experts and of experts."""
        parameters = [own for block in on_stages(self._args, model) for own in block.parameters]
        seconds = self._products()
        dense, experts = ([own for own in parameters if own.is_expert == which] for which in (False, True))
        return (
            Work(sum(own.local for own in dense), sum(map(seconds, dense))),
            Work(sum(own.local for own in experts), sum(map(seconds, experts))),
        )

    def _products(self) -> Callable[[Parameter], float]:
        """Seconds of the products and gathers of a parameter's step, which elementwise steps do not have."""
        args, device, optimizers = self._args, self._device, options.assignment(self._args)
        values = {name: step_values(args, name) for name in optimizers.used()}

        def seconds(own: Parameter) -> float:
            chosen = values[optimizers[own.role]]
            flops = sum(chosen.flops(*shape) for shape in own.matrices)
            if not flops:
                return 0.0
            gathered = _FP32 * math.prod(own.shape) * (own.cut - 1) / device.bandwidth(own.cut)
            return own.number * (flops / device.speed(chosen.precision) + gathered)

        return seconds

    def exchange(self, work: Iterable[Work]) -> Exchange:
        """What stages exchange; gradients, states and steps are spread over the stages evenly."""
        args, device = self._args, self._device
        stages = args.pipeline_model_parallel_size
        shard = args.tensor_model_parallel_size if args.sequence_parallel else 1
        message = self._tokens * args.hidden_size * self._width / shard
        replicas = args.data_parallel_size
        span = replicas * args.tensor_model_parallel_size
        experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1)
        sharded = args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer
        reduction = update = 0.0
        for own, ranks in zip(work, (replicas, max(1, span // experts)), strict=True):
            size = own.numbers / stages * (_FP32 + (self._width if sharded else _FP32))
            reduction += size * (ranks - 1) / ranks / device.bandwidth(span)
            # Gradient, weight and about two buffers are read, all but the gradient written.
            seconds = 7 * _FP32 * own.numbers / device.memory_bandwidth + own.seconds
            update += seconds / stages / (ranks if sharded else 1)
        transfer = 0.0 if stages == 1 else message / device.bandwidth(args.world_size)
        return Exchange(transfer, reduction, update)

    def _multiplied(self, parameter: Parameter) -> float:
        """Numbers of a parameter that a token is multiplied with on this rank."""
        if parameter.kind == "embedding":
            return 0.0
        if parameter.is_expert:
            return self._args.moe_router_topk * math.prod(parameter.shape)
        return parameter.local

    def _attention(self, layer: Block) -> float:
        """FLOPs for a token beside the weights: scores and values, the delta rule, or Mamba's scan."""
        args, parts = self._args, self._args.tensor_model_parallel_size
        if layer.has("linear_attention"):
            return 8 * args.linear_num_value_heads * args.linear_value_head_dim**2 / parts
        if layer.has("mamba"):
            return 7 * hybrid.mamba_heads(args) * args.mamba_head_dim * args.mamba_state_dim / parts
        if not layer.has("attention"):
            return 0.0
        whole = 2 if keeps_scores(args) else 1  # flash attention leaves the masked half out
        scored, summed = args.kv_channels, args.kv_channels
        if args.multi_latent_attention:
            scored, summed = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
        return whole * args.seq_length * args.num_attention_heads * (scored + summed) / parts

    def collectives(self, block: Block) -> float:
        """Seconds of the collectives of one pass through a block."""
        args, device = self._args, self._device
        tensor, experts = args.tensor_model_parallel_size, args.expert_model_parallel_size
        message = self._tokens * args.hidden_size * self._width
        seconds = sum(map(block.has, _REDUCED)) * 2 * message * (tensor - 1) / tensor / device.bandwidth(tensor)
        if block.has("experts"):
            sent = 2 * args.moe_router_topk * message / (tensor if args.sequence_parallel else 1)
            near = min(experts, max(1, device.devices_per_node // tensor))
            # Both kinds of links work at once.
            inside, between = (near - 1) / device.bandwidth_inside, (experts - near) / device.bandwidth_between
            seconds += sent / experts * max(inside, between)
        return seconds
