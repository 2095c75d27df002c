# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The one importer of private or version-dependent Megatron names (tested with megatron-core 0.19.2)."""
