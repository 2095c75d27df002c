# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Time of every block of a model on a device, and of what stages exchange: estimates from FLOPs, bytes and launches."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from megatron_async.models import hybrid
from megatron_async.optim import options
from megatron_async.optim.hyperparameters import Hyperparameters
from megatron_async.optim.param_groups import ROLES
from megatron_async.planning.devices import Device
from megatron_async.planning.parameters import SUBLAYERS, Block, Parameter, on_stages
from megatron_async.planning.resolve import copies_of, keeps_scores, owners_of, precision_of, step_values, width_of
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
_PASSES, _CORRECTED = 13, 11
"""fp32 numbers that an update reads or writes for each parameter, and further ones for a correction of the delay. The
gradient is read for its norm, scaled, read and cleared (5). Weight and about two buffers are read and written (6), the
weight is copied to the next version (2). Error feedback copies the weight (2), subtracts twice and adds (9)."""


Step = Callable[[Sequence[Parameter]], float]
"""Seconds of one batch's update of parameters that one rank owns."""


class CostModel:
    """Costs of a run's arguments on a device.

    Passes, updates, transfers and reductions depend on different sizes of a layout. A search of layouts works each out
    once for its own sizes.
    """

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
        """Time of each block of `parameters.blocks`: its passes and its update."""
        pairs = zip(self.passes(model), self.updates(model), strict=True)
        return [replace(own, update=update) for own, update in pairs]

    def passes(self, model: Sequence[Block]) -> list[BlockTime]:
        """Forward and backward of each block for one micro-batch; layers of equal shapes are estimated once.

        They depend on the tensor and expert parallel sizes, the micro-batch size and the recomputation.
        """
        layers = [own.alike for own in model[1:-1]]
        kinds = dict(zip(layers, model[1:-1], strict=True))
        first, *between, last = self._passes([model[0], *kinds.values(), model[-1]])
        times = dict(zip(kinds, between, strict=True))
        return [first, *(times[kind] for kind in layers), last]

    def _passes(self, model: Sequence[Block]) -> list[BlockTime]:
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

    def updates(self, model: Sequence[Block], step: Step | None = None) -> list[float]:
        """Seconds of one batch's update of each block; `step` has those of parameters without gathers.

        They depend on the tensor, expert, pipeline and data parallel sizes, and on whether gradients are delayed.
        """
        held, step = on_stages(self._args, model), step or self._step
        known = {alike: self._update(own, step) for alike, own in {own.alike: own for own in held}.items()}
        return [known[own.alike] for own in held]

    def _update(self, block: Block, step: Step) -> float:
        """Ranks share it where they share the optimizer's state."""
        if self._args.freeze_all_layers:
            return 0.0
        seconds = 0.0
        for experts, ranks in enumerate(owners_of(self._args)):
            own = [one for one in block.parameters if one.is_expert == bool(experts)]
            seconds += (step(own) + sum(map(self._gather, own))) / ranks
        return seconds

    @cached_property
    def _by_role(self) -> dict[str, Hyperparameters]:
        optimizers = options.assignment(self._args)
        values = {name: step_values(self._args, name) for name in optimizers.used()}
        return {role: values[optimizers[role]] for role in ROLES}

    def _gather(self, own: Parameter) -> float:
        """Seconds until a tensor-parallel rank has the whole matrices of a matrix optimizer."""
        whole = any(self._by_role[own.role].flops(*shape) for shape in own.matrices)
        return _FP32 * own.local * (own.cut - 1) / self._device.bandwidth(own.cut) if whole else 0.0

    def _step(self, parameters: Sequence[Parameter]) -> float:
        """An estimate: memory traffic, and products of matrices."""
        passes = _PASSES + (_CORRECTED if self._args.staleness_correction != "none" else 0)
        seconds = passes * _FP32 * sum(own.local for own in parameters) / self._device.memory_bandwidth
        for own in parameters:
            values = self._by_role[own.role]
            flops = own.number * sum(values.flops(*shape) for shape in own.matrices)
            seconds += flops / self._device.speed(values.precision)
        return seconds

    def exchange(self, model: Sequence[Block]) -> Exchange:
        """What stages exchange."""
        return Exchange(self.transfer(), self.reduction(model))

    def transfer(self) -> float:
        """Seconds of one micro-batch's activation between two stages; any size but the expert parallel one matters."""
        args = self._args
        if args.pipeline_model_parallel_size == 1:
            return 0.0
        shard = args.tensor_model_parallel_size if args.sequence_parallel else 1
        message = self._tokens * args.hidden_size * self._width / shard
        return message / self._device.bandwidth(args.world_size)

    def reduction(self, model: Sequence[Block]) -> float:
        """Seconds of the reductions of a batch's gradients, which are spread over the stages evenly.

        They depend on the tensor, expert, pipeline and data parallel sizes.
        """
        args, device = self._args, self._device
        stages = args.pipeline_model_parallel_size
        span = args.data_parallel_size * args.tensor_model_parallel_size
        sharded = args.use_distributed_optimizer or args.use_layer_wise_distributed_optimizer
        width = _FP32 + (self._width if sharded else _FP32)
        seconds = 0.0
        totals = zip(*(block.numbers for block in on_stages(args, model)), strict=True)
        for numbers, ranks in zip(totals, copies_of(args), strict=True):
            seconds += width * sum(numbers) / stages * (ranks - 1) / ranks / device.bandwidth(span)
        return seconds

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
