# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What a resumed run may change: one table of arguments by what depends on them. Every other argument may change."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fixed:
    """Arguments with one rule.

    Attributes:
        what: depends on them.
        names: of the arguments.
        unless: options with which they may change.
    """

    what: str
    names: tuple[str, ...]
    unless: str


LAYER_KINDS = ("experimental_attention_variant", "linear_attention_freq", "moe_layer_freq")
"""Say which kind each layer is of; with `--hybrid-layer-pattern` the pattern does."""
PATHS = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
"""Not compared if both runs know the contents of their training data."""
WSD = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
"""Compared if the learning rate decays in this style."""

MODEL = Fixed(
    "the model",
    (
        *"num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels".split(),
        *"group_query_attention max_position_embeddings position_embedding_type normalization".split(),
        *"layernorm_epsilon layernorm_zero_centered_gamma swiglu squared_relu quick_geglu glu_linear_offset".split(),
        "activation_func_clamp_value",
        *"add_bias_linear add_qkv_bias qk_layernorm qk_l2_norm attention_output_gate softmax_type".split(),
        *"window_size window_attn_skip_freq rotary_base rotary_percent rotary_interleaved no_rope_freq".split(),
        *"rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor".split(),
        *"untie_embeddings_and_output_weights vocab_size make_vocab_size_divisible_by".split(),
        *"use_mup mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim".split(),
        "mup_attn_scale_power",
        *LAYER_KINDS,
        *"linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads".split(),
        *"linear_num_value_heads mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads".split(),
        *"multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type".split(),
        *"rotary_scaling_factor mscale mscale_all_dim".split(),
        *"num_experts moe_ffn_hidden_size moe_router_topk moe_router_score_function moe_router_pre_softmax".split(),
        *"moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_apply_probs_on_input".split(),
        *"moe_router_enable_expert_bias moe_shared_expert_intermediate_size moe_shared_expert_gate".split(),
    ),
    "--finetune",
)
OPTIMIZER = Fixed(
    "the optimizer's state",
    ("optimizer", "fp16", "bf16", "use_distributed_optimizer", "use_layer_wise_distributed_optimizer"),
    "--finetune --no-load-optim",
)
DATA = Fixed(
    "the samples of a batch",
    (
        *"seed seq_length global_batch_size step_batch_size_schedule split mock_data tokenizer_type".split(),
        *"dataloader_type data_sharding".split(),
        *PATHS,
    ),
    "--finetune",
)
SCHEDULE = Fixed(
    "learning rate and weight decay by position in the run",
    (
        *"lr min_lr decoupled_lr decoupled_min_lr lr_warmup_init lr_warmup_iters lr_warmup_samples".split(),
        *"lr_warmup_fraction lr_decay_style lr_decay_iters lr_decay_samples".split(),
        *WSD,
        *"start_weight_decay end_weight_decay weight_decay_incr_style".split(),
    ),
    "--finetune --no-load-optim --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
)
TABLE = (MODEL, OPTIMIZER, DATA, SCHEDULE)

# The option of an argument, where its name is another.
_OPTIONS = {
    "use_layer_wise_distributed_optimizer": "use-distributed-optimizer",  # derived by Megatron
    "layernorm_epsilon": "norm-epsilon",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "add_bias_linear": "disable-bias-linear",
    "data_sharding": "no-data-sharding",
}


def option(name: str) -> str:
    """The option that sets an argument."""
    return f"--{_OPTIONS.get(name, name.replace('_', '-'))}"
