# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_async.doctor`: whether this machine, or every host of a job, is ready for a run."""
