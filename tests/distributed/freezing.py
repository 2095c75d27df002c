# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Training with some parameters frozen, as an extension of the model would do it."""

import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

from tests.distributed.jobs import Outcome, train


def train_without(pattern: str, arguments: Sequence[str]) -> Outcome:
    """`train`; parameters whose name in the whole model matches the pattern are not trained."""
    from megatron_async.models import gpt
    from megatron_async.models.naming import global_names

    def freeze(chunks: list[Any]) -> list[Any]:
        for chunk in chunks:
            for name, param in global_names(chunk):
                param.requires_grad_(not re.match(pattern, name))
        return chunks

    with mock.patch.object(gpt, "freeze", freeze):
        return train([*arguments, "--freeze-all-layers"])
