# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Warnings of Megatron's and torch's that the user of a run can do nothing about: two tables."""

import logging
import re
import warnings
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, slots=True)
class Message:
    """A warning that is not shown.

    Attributes:
        logger: name of its logger, the module that logs it.
        text: its beginning.
        reason: why nobody needs it.
    """

    logger: str
    text: str
    reason: str


MESSAGES = (
    Message(
        "megatron.core.models.gpt.gpt_model",
        "GPTModel IS DEPRECATED",
        "GPTModel is built where it was asked for, or where HybridModel lacks what the arguments ask for",
    ),
    Message(
        "megatron.core.rerun_state_machine",
        "RerunStateMachine initialized in mode",
        "this package switches it off: it would keep all micro-batches of a run",
    ),
    Message(
        "megatron.core.dist_checkpointing.strategies.torch",
        "MCore's async save is deprecated",
        "Megatron's own writer uses it for every checkpoint of one process, synchronous ones too",
    ),
    Message(
        "megatron.core.datasets.gpt_dataset",
        "Unable to save MockGPTDataset indexes",
        "mock data have no file whose index could be kept",
    ),
)

PYTHON_WARNINGS = {
    "Please use DTensor instead and we are deprecating ShardedTensor": "Megatron's reader of checkpoints has it",
    "The argument order of": "Megatron's reader calls torch's load the old way, which torch understands",
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to": (
        "Megatron's reader of common state is each rank's own"
    ),
}
"""Beginning of a warning of torch.distributed.checkpoint -> why nobody needs it."""


def hide() -> None:
    """Show none of `MESSAGES` and `PYTHON_WARNINGS` in this process."""
    for message in MESSAGES:
        logging.getLogger(message.logger).addFilter(partial(_shown, message))
    for text in PYTHON_WARNINGS:
        warnings.filterwarnings("ignore", message=re.escape(text))


def _shown(message: Message, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(message.text)
