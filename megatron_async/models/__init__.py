# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Model presets, initialization that does not depend on the layout, and the GPT forward step."""
