# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Imported by the server that worker processes are forked from: everything slow, and nothing that starts threads."""

import os
import warnings

import torch

from benchmarks.processes import DEVICE
from megatron_async import platform

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
platform.activate("cuda" if os.environ.get(DEVICE) == "cuda" else "cpu")


from megatron_async.training import run  # noqa: E402, F401
