# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Inputs of the device simulator: times, the machine, and how the host drives an update."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one rank on its device, in ms. A chunk takes an equal share.

    Attributes:
        forward, backward: of one micro-batch.
        step: optimizer step.
        reduction: of the gradients over the data-parallel replicas.
        gather: of the parameters after the step; 0 where there is none.
    """

    forward: float
    backward: float
    step: float = 0.0
    reduction: float = 0.0
    gather: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What all ranks share. Times in ms.

    Attributes:
        transfer: time of an activation or gradient between two ranks.
        norm: time of the gradient norm over the ranks that share it.
        launch: host time of a launch.
        launch_limit: launches that may wait in one hardware queue; None for no limit.
        launches: launches of a micro-batch, forward and backward together, in proportion to their times.
        step_launches: launches of an optimizer step.
        one_queue: whether all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).
    """

    transfer: float = 0.0
    norm: float = 0.0
    launch: float = 0.005
    launch_limit: int | None = 1000
    launches: int = 2000
    step_launches: int = 300
    one_queue: bool = False


Launch = Literal["update", "known", "norm", "once"]
"""When the host launches the norm and the step, see `Policy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the host drives an update: reduction at R, then the norm, then the step with the gather behind it.

    Attributes:
        launch: update: the norm when the host finds the reduction complete, the step at U.
            known: the norm as before, the step when the host finds the norm complete.
            norm: the norm at R, the step when the host finds the norm complete.
            once: everything at R; the device decides whether the step applies.
        side: the parts have a stream of their own. Otherwise they stand in the compute stream.
        own_gathers: gathers have a communicator of their own. Otherwise they share that of the reductions.
        pieces: pieces of a forward or backward between which the host can wait and look, as hooks of layers would.
        ahead: pieces of compute that the host may be ahead of its device; None for no bound but the launch limit.
        settle: so many actions before U the host waits for the norm and launches the step; 0 for never.
        post_ahead: a receive is posted before the compute that precedes its use. Otherwise at its use.
    """

    launch: Launch
    side: bool = True
    own_gathers: bool = True
    pieces: int = 1
    ahead: int | None = None
    settle: int = 0
    post_ahead: bool = True


POLICIES = {
    "host": Policy(launch="update", side=False, own_gathers=False),
    "at-once": Policy(launch="once"),
    "polled": Policy(launch="known", ahead=1),
    "when-known": Policy(launch="norm", ahead=1),
    "settle": Policy(launch="known", ahead=1, settle=1),
    "layers": Policy(launch="known", ahead=1, pieces=4),
}
"""Policies by name. `host` is the design that left the step and the gather at U. Runs use `at-once` and `when-known`;
before, the host launched the norm too (`polled`). The last two were tried for one hardware queue."""
