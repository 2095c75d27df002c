# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Steps of which only the device knows whether they apply, and steps in pieces with counters per group."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megatron_async.optim.corrections import PREVIOUS_UPDATE, Correction, ErrorFeedback, WeightPrediction
from megatron_async.optim.registry import OptimizerSpec, names, specs
from megatron_async.optim.step import MasterStep, StepContext, parts
from tests.standins import FusedAdam
from tests.unit.optim.test_corrections import build

BUILDERS: dict[str, Any] = dict(zip(names(), specs(), strict=True)) | {"FusedAdam": None}


def make(spec: OptimizerSpec | None) -> tuple[list[Parameter], torch.optim.Optimizer]:
    if spec is not None:
        return build(spec)
    torch.manual_seed(3)
    params = [Parameter(torch.randn(shape)) for shape in ((6, 10), (10, 6), (5,))]
    return params, FusedAdam([{"params": params[:1]}, {"params": []}, {"params": params[1:]}], lr=0.01)


def contents(params: list[Parameter], optimizer: torch.optim.Optimizer) -> list[Any]:
    """Weights, state and counters."""
    state = [(name, copy.deepcopy(value)) for param in params for name, value in optimizer.state[param].items()]
    return [
        *(param.detach().clone() for param in params),
        *(value for _, value in sorted(state, key=lambda entry: entry[0])),
        *(group.get("step") for group in optimizer.param_groups),
    ]


def assert_equal(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def set_gradients(params: list[Parameter], generator: torch.Generator) -> None:
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("correction", [None, ErrorFeedback, WeightPrediction])
@pytest.mark.parametrize("spec", BUILDERS.values(), ids=BUILDERS)
def test_the_device_decides_whether_a_step_applies(spec: Any, correction: type[Correction] | None) -> None:
    """Steps that apply are those of an unguarded run; one that does not leaves everything as it was."""
    runs = []
    for guarded in (False, True):
        params, optimizer = make(spec)
        # Pieces of a few elements: every piece has a guard of its own.
        own = correction([optimizer], 0.7) if correction else None
        step = MasterStep([optimizer], parts(correction=own), 50)
        generator, trajectory = torch.Generator().manual_seed(5), []
        for batch in range(4):
            set_gradients(params, generator)
            known = batch == 0 or not guarded  # the first step makes the state
            if batch == 2:
                before = contents(params, optimizer)
                for param in params:
                    param.grad = torch.zeros_like(param)
                if guarded:
                    step(StepContext(batch, torch.tensor(0.0, dtype=torch.float64), True, applies=torch.tensor(False)))
                    step.take_back()
                    assert_equal(contents(params, optimizer), before)
            elif known:
                step(StepContext(batch, 0.25, batch > 0))
            else:
                factor = torch.tensor(0.25, dtype=torch.float64)
                step(StepContext(batch, factor, batch > 0, applies=torch.tensor(True)))
            trajectory += contents(params, optimizer)
        runs.append(trajectory)
    assert_equal(*runs)


def test_pieces_take_the_same_step_of_a_group() -> None:
    ends = []
    for piece in (1, 60, 1 << 22):
        params, optimizer = make(None)
        step, generator = MasterStep([optimizer], parts(), piece), torch.Generator().manual_seed(5)
        for batch in range(3):
            set_gradients(params, generator)
            step(StepContext(batch))
        assert [group.get("step") for group in optimizer.param_groups] == [3, None, 3]
        ends.append(contents(params, optimizer))
    assert_equal(ends[0], ends[1])
    assert_equal(ends[0], ends[2])


def test_fused_adam_saves_and_loads_the_previous_update() -> None:
    params, optimizer = make(None)
    correction = ErrorFeedback([optimizer], 1.0)
    step = MasterStep([optimizer], parts(correction=correction))
    set_gradients(params, torch.Generator().manual_seed(5))
    step(StepContext(0))
    saved = copy.deepcopy(optimizer.state_dict())
    others, loaded = make(None)
    ErrorFeedback([loaded], 1.0)
    loaded.load_state_dict(saved)
    for param, other in zip(params, others, strict=True):
        assert torch.equal(optimizer.state[param][PREVIOUS_UPDATE], loaded.state[other][PREVIOUS_UPDATE])


def test_fused_adam_refuses_other_names() -> None:
    """The stand-in has the fault that the correction must avoid."""
    (param, *_), optimizer = make(None)
    optimizer.state[param]["unknown"] = torch.zeros_like(param)
    with pytest.raises(KeyError, match="unknown"):
        optimizer.state_dict()
