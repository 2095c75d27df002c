# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The optimizers that arXiv 2606.30634 compares, each in one file: hyper-parameters, update, registration.

Nothing here knows about Megatron. Matrix optimizers find the matrices inside a weight by its `Layout`.
"""

from megatron_async.optim.algorithms import from_libraries as from_libraries
from megatron_async.optim.algorithms.adamuon import AdaMuon
from megatron_async.optim.algorithms.adan import Adan
from megatron_async.optim.algorithms.mars import Mars
from megatron_async.optim.algorithms.mars_m import MarsM
from megatron_async.optim.algorithms.muon import Muon
from megatron_async.optim.algorithms.nadam import NAdam
from megatron_async.optim.algorithms.normuon import NorMuon
from megatron_async.optim.algorithms.signum import Signum
from megatron_async.optim.algorithms.soap import Soap

__all__ = ["AdaMuon", "Adan", "Mars", "MarsM", "Muon", "NAdam", "NorMuon", "Signum", "Soap"]
