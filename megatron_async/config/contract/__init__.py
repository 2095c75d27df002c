# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The contract of options: what becomes of each option of Megatron's parser, as tables."""
