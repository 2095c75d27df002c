# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Text corpora, preprocessing to Megatron's indexed format, and the data sets a run trains on."""
