# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Functions of `megatron.training` that this package calls as they are."""

from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.global_vars import (
    get_args,
    get_tensorboard_writer,
    get_tokenizer,
    get_wandb_writer,
    set_global_variables,
)
from megatron.training.models import GPTModelConfig
from megatron.training.models.gpt import default_layer_spec
from megatron.training.training import (
    build_train_valid_test_data_iterators,
    evaluate,
    num_floating_point_operations,
    update_train_iters,
)

__all__ = [
    "GPTModelConfig",
    "build_train_valid_test_data_iterators",
    "default_layer_spec",
    "evaluate",
    "get_args",
    "get_tensorboard_writer",
    "get_tokenizer",
    "get_wandb_writer",
    "gpt_config_from_args",
    "num_floating_point_operations",
    "pretrain_cfg_container_from_args",
    "set_global_variables",
    "update_train_iters",
]
