# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that a layer keeps from forward to backward, an estimate as in arXiv 2205.05198.

It counts the tensors that the backward of each operation reads, without small ones: of GPU kernels in
`fused_activations`, of torch modules in `torch_activations`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_async.planning import fused_activations, torch_activations
from megatron_async.planning.parameters import SUBLAYERS, Block, Chunk
from megatron_async.planning.resolve import keeps_scores, width_of
from megatron_async.schedules.arguments import schedule_of


@dataclass(frozen=True, slots=True)
class ActivationModel:
    """Activations of a run; `layers`: kinds of the sublayers of each layer, some of SUBLAYERS."""

    args: argparse.Namespace
    layers: list[list[str]]

    @classmethod
    def of(cls, args: argparse.Namespace, model: Sequence[Block]) -> "ActivationModel":
        return cls(args, [list(filter(own.has, SUBLAYERS)) for own in model[1:-1]])

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.args.micro_batch_size * self.args.seq_length

    def in_flight(self, chunk: Chunk) -> int:
        """Bytes that a chunk keeps for one micro-batch until its backward."""
        if self.args.recompute_granularity == "full":
            return len(chunk.layers) * self._hidden()
        return sum(map(self.layer, chunk.layers))

    def working(self, chunk: Chunk, last: bool) -> int:
        """Bytes for one micro-batch at a time, whatever the number in flight: logits, scores, recomputed layers."""
        vocabulary = self.args.padded_vocab_size // self.args.tensor_model_parallel_size
        # Logits in the model's precision and once more in fp32 for the cross entropy.
        logits = self.tokens * vocabulary * (width_of(self.args) + 4) if last else 0
        return logits + max(map(self._working, chunk.layers), default=0)

    def _working(self, number: int) -> int:
        """Bytes of layer `number`: Megatron's local attention computes its scores in one buffer for all layers."""
        args, scores = self.args, 0
        if keeps_scores(args) and "attention" in self.layers[number]:
            scores = self.tokens * args.seq_length * args.num_attention_heads // args.tensor_model_parallel_size
        return scores * width_of(args) + (self.layer(number) if args.recompute_granularity == "full" else 0)

    def messages(self, stage: int) -> int:
        """Bytes of messages of a stage: sent ones that a neighbor has not taken, and the next one from each."""
        schedule, stages = schedule_of(self.args), self.args.pipeline_model_parallel_size
        neighbors = (stage > 0) + (stage < stages - 1)
        if schedule.chunks > 1 and stages > 1:  # a ring
            neighbors = 2
        return neighbors * (schedule.untaken_sends(stages) + 1) * self._hidden()

    def layer(self, number: int) -> int:
        """Bytes that layer `number` keeps for one micro-batch."""
        return sum(map(self._sublayer, self.layers[number]))

    def _sublayer(self, kind: str) -> int:
        """A mixer or a block, with its norm."""
        args, kernels = self.args, torch_activations if keeps_scores(self.args) else fused_activations
        numbers: dict[str, Callable[[argparse.Namespace], int]] = {
            "attention": lambda args: self._projections(kernels.projections) + kernels.scores(args),
            "linear_attention": kernels.linear_attention,
            "mamba": kernels.mamba,
            "feed_forward": lambda args: kernels.feed_forward(args, args.ffn_hidden_size),
            "experts": kernels.experts,
        }
        norm: int = kernels.norm(args) * self._hidden() // args.hidden_size
        return norm + self.tokens * numbers[kind](args) * width_of(self.args) // args.tensor_model_parallel_size

    def _projections(self, plain: Callable[[argparse.Namespace], int]) -> int:
        """Numbers for a token of attention without its scores; `plain` counts those without latents."""
        args = self.args
        if not args.multi_latent_attention:
            return plain(args)
        latents, heads = (args.q_lora_rank or 0) + args.kv_lora_rank, args.num_attention_heads
        if args.qk_layernorm:
            latents *= 2
        rotary = args.qk_pos_emb_head_dim
        kept: int = latents + rotary + 2 * heads * (args.qk_head_dim + rotary + args.v_head_dim)
        return kept

    def _hidden(self) -> int:
        parts = self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1
        return self.tokens * self.args.hidden_size * width_of(self.args) // parts
