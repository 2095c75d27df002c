# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Which module computes each part of a layer: Megatron's layer specs for the local (torch) and the GPU modules."""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_async.mcore.model import (
    dense_mlp_spec,
    gpu_layer_specs,
    layers_of_stage,
    linear_attention_pattern,
    moe_layer_pattern,
)
from megatron_async.mcore.training import GPTModelConfig, default_layer_spec
from megatron_async.models.gated_delta_net import GatedDeltaNet
from megatron_async.models.norms import HeadNorm, RMSNorm, rms_norm


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel product, with the parameter names of Transformer Engine's fused module."""

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
    """Layers of this stage. Variants that no preset uses are left to Megatron."""
    transformer = config.transformer
    variant, local = transformer.experimental_attention_variant, transformer.transformer_impl == "local"
    if variant not in (None, "gated_delta_net") or (variant is None and not local) or _is_special(transformer):
        return default_layer_spec(config, vp_stage)
    if local:
        backend = LocalBackend()
        layers = [_local_layer(transformer, backend, number) for number in range(transformer.num_layers)]
    else:
        backend, layers = gpu_layer_specs(transformer)
        for layer in layers:
            if layer.submodules.self_attention.module is MegatronGatedDeltaNet:
                layer.submodules.self_attention = _delta_net(backend)
    stage = layers_of_stage(transformer, vp_stage)
    norm = backend.layer_norm(rms_norm=transformer.normalization == "RMSNorm", for_qk=False)
    return TransformerBlockSubmodules(layer_specs=[layers[number] for number in stage], layer_norm=norm)


def _is_special(transformer: Any) -> bool:
    return bool(
        transformer.multi_latent_attention
        or transformer.use_kitchen
        or transformer.heterogeneous_block_specs
        or transformer.mtp_num_layers
    )


def _local_layer(transformer: Any, backend: LocalBackend, number: int) -> ModuleSpec:
    """One layer out of local modules; `number` counts from 0 through the whole model."""
    norm = backend.layer_norm(rms_norm=transformer.normalization == "RMSNorm", for_qk=False)
    linear = bool(linear_attention_pattern(transformer)[number])
    experts = transformer.num_moe_experts is not None and bool(moe_layer_pattern(transformer)[number])
    # Names in checkpoints are those of the fused GPU modules, so that either run reads the other's.
    names = {} if linear else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if linear else norm,
            self_attention=_delta_net(backend) if linear else _attention(transformer, backend),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_experts(transformer, backend) if experts else dense_mlp_spec(backend),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def _delta_net(backend: Any) -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_layer_norm_linear(),
            out_norm=HeadNorm,
            out_proj=backend.row_parallel_linear(),
        ),
    )


def _attention(transformer: Any, backend: LocalBackend) -> ModuleSpec:
    normalized: Any = IdentityOp
    if transformer.qk_l2_norm:
        normalized = L2Norm
    elif transformer.qk_layernorm:
        normalized = backend.layer_norm(rms_norm=transformer.normalization == "RMSNorm", for_qk=True)
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=normalized,
            k_layernorm=normalized,
        ),
    )


def _experts(transformer: Any, backend: LocalBackend) -> Any:
    return get_moe_module_spec_for_backend(
        backend=backend, num_experts=transformer.num_moe_experts, moe_grouped_gemm=transformer.moe_grouped_gemm
    )
