# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The delay oracle and the ablations of arXiv 2606.30634. They are not part of production training."""
