# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The step loop and what surrounds it: phases, evaluation, metrics, reports."""
