# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The delay oracle: one process that emulates the delay, and ablations of arXiv 2606.30634. No part of production."""

from megatron_async.reference.steps import OracleSteps, make_steps

__all__ = ["OracleSteps", "make_steps"]
