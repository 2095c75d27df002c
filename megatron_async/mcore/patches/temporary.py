# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Names that are replaced for the time of one call: `with PATCH.replaced(lambda original: replacement): ...`."""

from megatron_async.mcore.patches.patch import Patch

OPTIMIZER_OF_MODEL = Patch(
    "megatron.training.training:get_megatron_optimizer",
    "set-up builds the optimizer that --optimizer names, one for all chunks",
    "training/training.py: optimizer = get_megatron_optimizer(",
)
OPTIMIZER_OF_GROUPS = Patch(
    "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
    "beside the chosen optimizer only Adam, SGD and Lion can be built",
    "core/optimizer/__init__.py: raise Exception('{} optimizer is not supported.'.format(config.optimizer))",
)
COMMON_STATE = Patch(
    "megatron.core.dist_checkpointing.serialization:load_common_state_dict",
    "parameter groups of another layout's checkpoint are fitted before tensors are merged into them",
    "core/dist_checkpointing/serialization.py: common_state_dict = load_common_state_dict(checkpoint_dir)",
)
WANDB_ARTIFACT = Patch(
    "megatron.training.wandb_utils:on_save_checkpoint_success",
    "a checkpoint is announced to wandb before our background writer has written it",
    "training/checkpointing.py: wandb_utils.on_save_checkpoint_success(",
)
FORWARD_STEP = Patch(
    "megatron.core.pipeline_parallel.schedules:forward_step",
    "the synchronous schedules do not report when a forward starts and ends",
    "core/pipeline_parallel/schedules.py: output_tensor, num_tokens = forward_step(",
)
BACKWARD_STEP = Patch(
    "megatron.core.pipeline_parallel.schedules:backward_step",
    "the synchronous schedules do not report when a backward starts and ends",
    "core/pipeline_parallel/schedules.py: input_tensor_grad = backward_step(",
)
DEVICE_GENERATION = Patch(
    "megatron.training.arguments:get_device_arch_version",
    "one hardware queue is demanded for tensor parallelism before Blackwell (10), where delayed schedules can hang",
    "training/arguments.py: and get_device_arch_version() < 10:",
)
CREATE_GROUP = Patch(
    "megatron.core.parallel_state:create_group",
    "every rank makes the groups of all ranks, thousands for a planned job with an expert on each rank; one that "
    "pretends to be in a job needs its own",
    "core/parallel_state.py: if torch.distributed.get_rank() in ranks:",
)
CURRENT_DEVICE = Patch(
    "torch.cuda:current_device",
    "parameters are made on the current GPU; the planner makes them on the meta device",
    "core/tensor_parallel/layers.py: device=torch.cuda.current_device()",
)
OPTION_TEXTS = Patch(
    "megatron.training.argument_utils:ArgumentGroupFactory._get_field_docstrings",
    "help texts are read from the sources of dataclasses, which takes most of a parser's time; only --help needs them",
    "training/argument_utils.py: source = inspect.getsource(src_cfg_class)",
)
WANDB_WRITER = Patch(
    "megatron.training.global_vars:_GLOBAL_WANDB_WRITER",
    "Megatron's own set-up of wandb needs --save and ends the run where the server cannot be reached",
    "training/global_vars.py: _GLOBAL_WANDB_WRITER = wandb",
)
ROUTER_LOSS_SCALE = Patch(
    "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.main_loss_backward_scale",
    "the first backward of a process makes it, and one outside a run makes one of another shape",
    "core/transformer/moe/moe_utils.py: if MoEAuxLossAutoScaler.main_loss_backward_scale is None:",
)

TEMPORARY: tuple[Patch, ...] = tuple(patch for patch in list(globals().values()) if isinstance(patch, Patch))
