# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import contextlib


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


fp8_autocast = fp8_model_init = contextlib.nullcontext
