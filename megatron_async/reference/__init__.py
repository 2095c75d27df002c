# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Delay oracle: one process that emulates the delay, and the ablations of arXiv 2606.30634."""
