# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The modules of a HybridModel: each kind of layer, and the stack of a stage. A GPT's layer is two of them."""

from typing import Any

from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.transformer.utils import sharded_state_dict_default

from megatron_async.mcore.model import layers_of_gpt_layer
from megatron_async.models.mamba import MambaMixer
from megatron_async.models.naming import layer_number
from megatron_async.models.specs import backend_of, delta_net, layer_submodules


class Stack(HybridStack):
    """A stack whose final norm is of the run's implementation; Megatron's is always Transformer Engine's."""

    _norm_name = "final_norm"

    def __init__(self, config: Any, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            norm = backend_of(config).layer_norm(rms_norm=config.normalization == "RMSNorm")
            setattr(self, self._norm_name, norm(config, config.hidden_size, config.layernorm_epsilon))


class GPTStack(Stack):
    """The layers of a GPT, two for each of them, with the names that a GPT has in checkpoints."""

    _norm_name = "final_layernorm"

    @property
    def final_norm(self) -> Any:
        """The norm, where Megatron's forward looks for it."""
        return self.final_layernorm

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As that of a GPT (core/transformer/transformer_block.py: non_homogeneous_layers): layers that are all alike
        are one tensor with an axis of layers, others have tensors of their own."""
        state: dict[str, Any] = {}
        for index, layer in enumerate(self.layers):
            own, number = f"{prefix}layers.{index}.", layer_number(layer) - 1
            saved, offsets = f"{prefix}layers.{number}.", []
            if self._alike(metadata or {}):
                saved, offsets = f"{prefix}layers.", [(0, number, self.config.num_layers // 2)]
            part = layer.sharded_state_dict(own, offsets, metadata)
            replace_prefix_for_sharding(part, own, saved)
            state |= part
        if hasattr(self, "final_layernorm"):
            state |= sharded_state_dict_default(
                self.final_layernorm, f"{prefix}final_layernorm.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state

    def _alike(self, metadata: dict[str, Any]) -> bool:
        frequencies = (self.config.moe_layer_freq, self.config.linear_attention_freq or 1)
        told = metadata.get("non_homogeneous_layers") or metadata.get("singleton_local_shards")
        return not told and not self.config.hetereogenous_dist_checkpoint and frequencies == (1, 1)


def stack_spec(transformer: Any) -> ModuleSpec:
    """Modules of each kind of layer, local (torch) or Transformer Engine's: the halves of a GPT's layer, and Mamba.

    Local modules have separate norms; checkpoints give these the names of the fused GPU modules, so that local and GPU
    runs read each other's.
    """
    backend = backend_of(transformer)
    dense = experts = layer_submodules(transformer, experts=False)
    if transformer.num_moe_experts is not None:
        experts = layer_submodules(transformer, experts=True)
    add, block = dense.self_attn_bda, ("pre_mlp_layernorm", "mlp", "mlp_bda")
    attention = ModuleSpec(
        TransformerLayer, submodules=_part(dense, "input_layernorm", "self_attention", "self_attn_bda")
    )
    linear = TransformerLayerSubmodules(self_attention=delta_net(backend), self_attn_bda=add)
    return ModuleSpec(
        GPTStack if layers_of_gpt_layer(transformer) > 1 else Stack,
        submodules=HybridStackSubmodules(
            mamba_layer=_mamba(transformer, backend, add),
            gdn_layer=ModuleSpec(TransformerLayer, submodules=linear),
            attention_layer=attention,
            mla_layer=attention,
            mlp_layer=ModuleSpec(MLPLayer, submodules=_part(dense, *block)),
            moe_layer=ModuleSpec(MoETransformerLayer, submodules=_part(experts, *block)),
        ),
    )


def _part(layer: TransformerLayerSubmodules, *modules: str) -> TransformerLayerSubmodules:
    """Some modules of a layer, with their names in checkpoints."""
    names = layer.sharded_state_dict_keys_map
    return TransformerLayerSubmodules(
        **{name: getattr(layer, name) for name in modules},
        sharded_state_dict_keys_map={
            name: saved for name, saved in names.items() if ("mlp" in name) == ("mlp" in modules)
        },
    )


def _mamba(transformer: Any, backend: Any, add: Any) -> ModuleSpec:
    separate: dict[str, Any] = {}
    first = backend.column_parallel_layer_norm_linear()
    if transformer.transformer_impl == "local":
        norm = backend.layer_norm(rms_norm=transformer.normalization == "RMSNorm")
        separate = {"norm": norm, "sharded_state_dict_keys_map": {"norm.": "mixer.in_proj.layer_norm_"}}
        first = backend.column_parallel_linear()
    projections = MambaMixerSubmodules(in_proj=first, out_proj=backend.row_parallel_linear())
    mixer = ModuleSpec(MambaMixer, submodules=projections)
    return ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=add, **separate))
