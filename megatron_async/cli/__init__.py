# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The commands of `megatron-async`; each module's `main(argv)` returns the exit status."""
