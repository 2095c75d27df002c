# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Bytes of activations that a layer keeps from forward to backward, an estimate as in arXiv 2205.05198.

It counts the tensors that the backward of each operation reads, without small ones: of GPU kernels here, of torch
modules in `torch_activations`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_async.models import hybrid
from megatron_async.planning import torch_activations as local
from megatron_async.planning.parameters import Block, Chunk
from megatron_async.planning.resolve import keeps_scores, key_value_heads


@dataclass(frozen=True, slots=True)
class ActivationModel:
    """Activations of a run; `linear`, `experts`: for each layer, whether it has linear attention and experts."""

    args: argparse.Namespace
    linear: list[bool]
    experts: list[bool]

    @classmethod
    def of(cls, args: argparse.Namespace, model: Sequence[Block]) -> "ActivationModel":
        layers = model[1:-1]
        return cls(args, [own.has("linear_attention") for own in layers], [own.has("experts") for own in layers])

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a context-parallel rank."""
        return self.args.micro_batch_size * self.args.seq_length // self.args.context_parallel_size

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return 2 if self.args.bf16 or self.args.fp16 else 4

    def in_flight(self, chunk: Chunk) -> int:
        """Bytes that a chunk keeps for one micro-batch until its backward."""
        if self.args.recompute_granularity == "full":
            return len(chunk.layers) * self._hidden()
        return sum(self.layer(number) for number in chunk.layers)

    def working(self, chunk: Chunk, last: bool) -> int:
        """Bytes for one micro-batch at a time, whatever the number in flight: logits, and recomputed layers."""
        recomputed = 0
        if self.args.recompute_granularity == "full" and chunk.layers:
            recomputed = max(self.layer(number) for number in chunk.layers)
        vocabulary = self.args.padded_vocab_size // self.args.tensor_model_parallel_size
        # Logits in the model's precision and once more in fp32 for the cross entropy.
        return recomputed + (self.tokens * vocabulary * (self.width + 4) if last else 0)

    def layer(self, number: int) -> int:
        """Bytes that layer `number` keeps for one micro-batch."""
        if self.args.hybrid_layer_pattern is not None:
            letters = hybrid.layers_of(self.args.hybrid_layer_pattern)[number]
        else:
            letters = ("G" if self.linear[number] else "*") + ("E" if self.experts[number] else "-")
        return sum(map(self._sublayer, letters))

    def _sublayer(self, letter: str) -> int:
        """A layer of a HybridModel: its norm, and a mixer or a block."""
        args = self.args
        if keeps_scores(args):
            parts = {
                "M": local.mamba,
                "G": local.linear_attention,
                "*": self._local_attention,
                "E": local.experts,
                "-": lambda args: local.feed_forward(args, args.ffn_hidden_size),
            }
            norm = local.norm(args) * self._hidden() // args.hidden_size
            return norm + self.tokens * parts[letter](args) * self.width // args.tensor_model_parallel_size
        sizes = {"M": self._mamba, "G": self._linear_attention, "*": self._attention, "E": self._experts}
        return 2 * self._hidden() + (self._dense(args.ffn_hidden_size) if letter == "-" else sizes[letter]())

    def _local_attention(self, args: argparse.Namespace) -> int:
        recomputes_core = args.recompute_granularity == "selective" and "core_attn" in (args.recompute_modules or [])
        projections = self._latent_projections() if args.multi_latent_attention else local.projections(args)
        return projections + (0 if recomputes_core else local.scores(args))

    def _hidden(self) -> int:
        parts = self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1
        return self.tokens * self.args.hidden_size * self.width // parts

    def _attention(self) -> int:
        args = self.args
        per_token = self._latent_projections() if args.multi_latent_attention else self._projections()
        return self.tokens * per_token * self.width // args.tensor_model_parallel_size

    def _projections(self) -> int:
        """Numbers for a token: queries, keys, values, the output of attention, and what norms and gates read."""
        args = self.args
        heads, groups = args.num_attention_heads, key_value_heads(args)
        query, key_value = heads * args.kv_channels, 2 * groups * args.kv_channels
        gate = 2 * query if args.attention_output_gate else 0  # the gate, and the output before it
        norms = query + key_value // 2 if args.qk_layernorm else 0
        return 2 * query + key_value + gate + norms

    def _latent_projections(self) -> int:
        """The same with multi-latent attention, with the latents."""
        args = self.args
        latents, heads = (args.q_lora_rank or 0) + args.kv_lora_rank, args.num_attention_heads
        if args.qk_layernorm:
            latents *= 2
        rotary = args.qk_pos_emb_head_dim
        return latents + rotary + 2 * heads * (args.qk_head_dim + rotary + args.v_head_dim)

    def _linear_attention(self) -> int:
        args = self.args
        key = args.linear_num_key_heads * args.linear_key_head_dim
        value = args.linear_num_value_heads * args.linear_value_head_dim
        repeated = args.linear_num_value_heads * args.linear_key_head_dim
        projected = 2 * key + 2 * value
        convolved = 2 * (2 * key + value)  # before and after the activation
        per_token = projected + convolved + 2 * repeated + 3 * value  # queries and keys by head; output, norm, gated
        return self.tokens * per_token * self.width // args.tensor_model_parallel_size

    def _mamba(self) -> int:
        args = self.args
        heads = hybrid.mamba_heads(args)
        inner, mapped = heads * args.mamba_head_dim, 2 * args.mamba_num_groups * args.mamba_state_dim
        # Projected; x, B, C before and after the activation; output, gated, normalized.
        per_token = 2 * inner + mapped + heads + 2 * (inner + mapped) + 3 * inner
        return self.tokens * per_token * self.width // args.tensor_model_parallel_size

    def _dense(self, size: int) -> int:
        inner = 3 if self.args.swiglu else 2  # gate, up, product
        return self.tokens * inner * size * self.width // self.args.tensor_model_parallel_size

    def _experts(self) -> int:
        args = self.args
        chosen = args.moe_router_topk
        sent = chosen * self.tokens * args.hidden_size * self.width * 2  # to the experts and back
        shared = self._dense(args.moe_shared_expert_intermediate_size or 0)
        router = self.tokens * args.num_experts * 4 * 2  # logits and probabilities, fp32
        return sent + chosen * self._dense(args.moe_ffn_hidden_size) + shared + router
