# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The architectures of Hugging Face that can be converted. A new one is a module here and an entry in the table."""

from megatron_async.models.huggingface.families.deepseek_v3 import DEEPSEEK_V3
from megatron_async.models.huggingface.families.family import Family
from megatron_async.models.huggingface.families.llama import LLAMA
from megatron_async.models.huggingface.families.nemotron_h import NEMOTRON_H
from megatron_async.models.huggingface.families.qwen3_moe import QWEN3_MOE
from megatron_async.models.huggingface.families.qwen3_next import QWEN3_NEXT

FAMILIES: dict[str, Family] = {
    family.name: family for family in (LLAMA, QWEN3_MOE, QWEN3_NEXT, DEEPSEEK_V3, NEMOTRON_H)
}
"""Name -> family. Megatron's model is of the last one that describes its arguments."""
