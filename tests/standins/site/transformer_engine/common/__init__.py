# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
from transformer_engine.common import recipe as recipe
