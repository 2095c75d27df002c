# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Layer specs: the modules of each layer, local (torch) or Transformer Engine."""

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_moe_layer_pattern
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_async.mcore.model import layers_of_stage, linear_attention_pattern
from megatron_async.mcore.training import GPTModelConfig, default_layer_spec
from megatron_async.models import latent_attention
from megatron_async.models.gated_delta_net import GatedDeltaNet
from megatron_async.models.norms import HeadNorm, RMSNorm, rms_norm


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer; parameter names are those of Transformer Engine's fused module."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self._eps, self._zero_centered = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self.layer_norm_weight = RMSNorm(config, input_size, config.layernorm_epsilon).weight

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = rms_norm(input_, self.layer_norm_weight, self._eps, zero_centered=self._zero_centered)
        return super().forward(normed, *args, **kwargs)


class LocalBackend(LocalSpecProvider):
    """Megatron's local modules, with an RMSNorm that supports sequence parallelism."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return RMSNorm if rms_norm else super().layer_norm(rms_norm, for_qk, has_residual)

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear


def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Layer specs of this stage. Variants that no preset uses are left to Megatron."""
    transformer = config.transformer
    variant, local = transformer.experimental_attention_variant, transformer.transformer_impl == "local"
    special = transformer.use_kitchen or transformer.heterogeneous_block_specs or transformer.mtp_num_layers
    if special or variant not in (None, "gated_delta_net") or (variant is None and not local):
        return default_layer_spec(config, vp_stage)
    layers = [_layer(transformer, number) for number in layers_of_stage(transformer, vp_stage)]
    norm = backend_of(transformer).layer_norm(rms_norm=transformer.normalization == "RMSNorm", for_qk=False)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def backend_of(transformer: Any) -> Any:
    """The provider of a run's modules, local or Transformer Engine's."""
    if transformer.transformer_impl == "local":
        return LocalBackend()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def layer_submodules(transformer: Any, *, experts: bool) -> TransformerLayerSubmodules:
    """Modules of a GPT's layer with softmax attention and a dense feed-forward block or experts."""
    local = transformer.transformer_impl == "local"
    make = get_gpt_layer_local_submodules if local else get_gpt_layer_with_transformer_engine_submodules
    # Megatron's specs with its default norm: asking for RMSNorm here would change that default for the whole process.
    layer: TransformerLayerSubmodules = make(
        num_experts=transformer.num_moe_experts if experts else None,
        moe_grouped_gemm=transformer.moe_grouped_gemm,
        qk_layernorm=transformer.qk_layernorm,
        qk_l2_norm=transformer.qk_l2_norm,
        multi_latent_attention=transformer.multi_latent_attention,
    )
    if not local:
        return layer
    if transformer.multi_latent_attention:
        latent_attention.use_local(layer, transformer)
    if transformer.normalization == "RMSNorm":
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        plain = not transformer.multi_latent_attention and not transformer.qk_l2_norm
        if transformer.qk_layernorm and plain:
            attention = layer.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    # The map gives checkpoints the names of the fused GPU modules, so that local and GPU runs read each other's.
    if experts:
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return layer


def _layer(transformer: Any, number: int) -> ModuleSpec:
    """One layer of a GPT; `number` counts from 0 through the whole model."""
    experts = transformer.num_moe_experts is not None and bool(get_moe_layer_pattern(transformer)[number])
    layer = layer_submodules(transformer, experts=experts)
    if linear_attention_pattern(transformer)[number]:
        layer.input_layernorm, layer.self_attention = IdentityOp, delta_net(backend_of(transformer))
        layer.sharded_state_dict_keys_map.pop("input_layernorm.", None)  # local layers alone have a map
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def delta_net(backend: Any) -> ModuleSpec:
    """The modules of a Gated DeltaNet mixer."""
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_layer_norm_linear(),
            out_norm=HeadNorm,
            out_proj=backend.row_parallel_linear(),
        ),
    )
