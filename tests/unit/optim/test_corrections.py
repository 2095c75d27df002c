# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Corrections against plain Python on a scalar, and what they promise for every optimizer."""

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_async.optim.corrections import (
    PREVIOUS_UPDATE,
    Correction,
    DelayCompensation,
    ErrorFeedback,
    GradientErrorFeedback,
    RawGradientErrorFeedback,
    UpdatedWeightPrediction,
    WeightPrediction,
    leave_out,
)
from megatron_async.optim.corrections.base import remember
from megatron_async.optim.registry import OptimizerSpec, find, names, specs
from megatron_async.optim.step import MasterStep, StepContext, clip_factor, parts, pieces

CLASSES = [
    ErrorFeedback,
    WeightPrediction,
    UpdatedWeightPrediction,
    DelayCompensation,
    GradientErrorFeedback,
    RawGradientErrorFeedback,
]
LR, MU, STEPS = 0.1, 0.5, 7


def take_step(
    optimizer: torch.optim.Optimizer, correction: Correction | None, *, corrected: bool = False, piece: int = 1 << 22
) -> None:
    if correction is not None:
        correction.before_norm(corrected)
    MasterStep([optimizer], parts(correction=correction), piece)(StepContext(batch=0, corrected=corrected))


def run_delayed(kind: type[Correction] | None, strength: float, momentum: float = 0.0) -> list[float]:
    """Loss w^2/2 from 1.0 with gradients one step old, as design: W_0 for batches 0 and 1, then W_(b-1)."""
    weight = Parameter(torch.ones(1, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=LR, momentum=momentum, dampening=momentum)
    correction = kind([optimizer], strength) if kind else None
    seen = [weight.item()]
    for batch in range(STEPS):
        weight.grad = torch.full_like(weight, seen[max(0, batch - 1)])
        take_step(optimizer, correction, corrected=kind is not None and (kind.from_first_update or batch > 0))
        seen.append(weight.item())
    return seen


def plain(rule: Callable[[float, float, float, float], tuple[float, float]]) -> list[float]:
    """The same by hand; `rule` maps (W_b, W_(b-1), u_b, u_(b-1)) to the next weight."""
    seen, last = [1.0], 0.0
    for batch in range(STEPS):
        gradient = seen[max(0, batch - 1)]
        following, last = rule(seen[-1], seen[max(0, batch - 1)], gradient, last if batch else math.nan)
        seen.append(following)
    return seen


def test_the_scalar_check_of_plain_delay_and_of_error_feedback() -> None:
    def error_feedback(now: float, _: float, gradient: float, last: float) -> tuple[float, float]:
        update = LR * gradient
        return now - update - (0.0 if math.isnan(last) else update - last), update

    assert run_delayed(ErrorFeedback, 1.0) == pytest.approx(plain(error_feedback), rel=1e-12)
    assert run_delayed(None, 0.0)[:6] == pytest.approx([1, 0.9, 0.8, 0.71, 0.63, 0.559], rel=1e-12)


def test_delay_compensation_by_hand() -> None:
    def rule(now: float, before: float, gradient: float, last: float) -> tuple[float, float]:
        corrected = gradient if math.isnan(last) else gradient + 0.7 * gradient**2 * (now - before)
        return now - LR * corrected, 0.0

    assert run_delayed(DelayCompensation, 0.7) == pytest.approx(plain(rule), rel=1e-12)


@pytest.mark.parametrize("kind", [GradientErrorFeedback, RawGradientErrorFeedback])
def test_gradient_error_feedback_by_hand(kind: type[Correction]) -> None:
    def rule(now: float, _: float, gradient: float, last: float) -> tuple[float, float]:
        corrected = gradient if math.isnan(last) else gradient + 0.7 * (gradient - last)
        return now - LR * corrected, gradient

    assert run_delayed(kind, 0.7) == pytest.approx(plain(rule), rel=1e-12)


def test_raw_feedback_clips_what_it_has_corrected() -> None:
    """Gradients 8, then 3, clipped to 1: 1 and -1 from 2 x 3 - 8 = -2; on clipped gradients 1 and 1."""
    ends = {}
    for kind in (GradientErrorFeedback, RawGradientErrorFeedback):
        weight = Parameter(torch.zeros(1, 1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        correction = kind([optimizer], 1.0)
        for batch, gradient in enumerate((8.0, 3.0)):
            weight.grad = torch.full_like(weight, gradient)
            correction.before_norm(batch > 0)
            factor = clip_factor(float(weight.grad.norm()), 1.0)
            MasterStep([optimizer], parts(correction=correction))(StepContext(batch, factor, corrected=batch > 0))
        ends[kind] = weight.item()
    assert ends == {GradientErrorFeedback: pytest.approx(-2), RawGradientErrorFeedback: pytest.approx(0, abs=1e-5)}


@pytest.mark.parametrize("updated", [False, True])
def test_weight_prediction_by_hand(updated: bool) -> None:
    """Momentum, so that a second evaluation differs from the first: m' = mu m + (1 - mu) g once more."""
    seen, accumulator, momentum = [1.0], 1.0, 0.0
    for batch in range(STEPS):
        gradient = seen[max(0, batch - 1)]
        momentum = gradient if batch == 0 else MU * momentum + (1 - MU) * gradient  # torch's SGD starts with g
        accumulator -= LR * momentum
        again = MU * momentum + (1 - MU) * gradient if updated else momentum
        seen.append(accumulator - 0.7 * LR * again)
    kind = UpdatedWeightPrediction if updated else WeightPrediction
    assert run_delayed(kind, 0.7, MU) == pytest.approx(seen, rel=1e-12)


def build(info: OptimizerSpec) -> tuple[list[Parameter], torch.optim.Optimizer]:
    torch.manual_seed(3)
    shapes = [(6, 10), (10, 6)] + ([(5,)] if info.scope != "matrix" else [])
    params = [Parameter(torch.randn(shape)) for shape in shapes]
    extra = {"momentum": 0.9, "weight_decay": 0.1} if info.name == "sgd" else {}
    return params, info.build(params, lr=0.01, **extra)


def steps(
    params: list[Parameter],
    optimizer: torch.optim.Optimizer,
    correction: Correction | None,
    count: int,
    piece: int = 1 << 22,
) -> None:
    generator = torch.Generator().manual_seed(5)
    for step in range(count):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        take_step(optimizer, correction, corrected=step > 0, piece=piece)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("info", specs(), ids=names())
def test_strength_zero_is_no_correction_to_the_last_bit(info: OptimizerSpec, kind: type[Correction]) -> None:
    params, optimizer = build(info)
    others, corrected = build(info)
    correction = kind([corrected], 0.0)
    steps(params, optimizer, None, 4)
    steps(others, corrected, correction, 4)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("info", specs(), ids=names())
def test_error_feedback_for_every_optimizer(info: OptimizerSpec) -> None:
    """W_(b+1) = W_b - u_b - k (u_b - u_(b-1)), u from a twin whose weights are set to W_b before each step."""
    params, optimizer = build(info)
    twins, twin = build(info)
    correction = ErrorFeedback([optimizer], 0.5)
    generator, last = torch.Generator().manual_seed(5), None
    for step in range(4):
        before = [param.detach().clone() for param in params]
        for param, other, weights in zip(params, twins, before, strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            other.grad = param.grad.clone()
            other.detach().copy_(weights)
        take_step(optimizer, correction, corrected=step > 0)
        twin.step()
        updates = [weights - other.detach() for weights, other in zip(before, twins, strict=True)]
        for position, (param, weights) in enumerate(zip(params, before, strict=True)):
            expected = weights - updates[position]
            if last is not None:
                expected = expected - 0.5 * (updates[position] - last[position])
            torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(optimizer.state[param][PREVIOUS_UPDATE], updates[position], rtol=1e-5, atol=1e-7)
        last = updates


@pytest.mark.parametrize("info", [info for info in specs() if info.name != "soap"], ids=lambda info: info.name)
def test_weight_prediction_is_error_feedback_up_to_the_first_update(info: OptimizerSpec) -> None:
    """The same gradients, no decay: the weights differ by k u_0 from the second step on."""
    ends = []
    for kind in (ErrorFeedback, WeightPrediction):
        torch.manual_seed(3)
        param = Parameter(torch.randn(6, 10))
        start = param.detach().clone()
        optimizer = info.build([param], lr=0.01, weight_decay=0.0)
        correction = kind([optimizer], 0.5)
        steps([param], optimizer, correction, 1)
        first = start - param.detach()
        generator = torch.Generator().manual_seed(9)
        for _ in range(3):
            param.grad = torch.randn(param.shape, generator=generator)
            take_step(optimizer, correction, corrected=True)
        ends.append(param.detach())
    torch.testing.assert_close(ends[0] - ends[1], 0.5 * first, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("info", specs(), ids=names())
def test_a_second_evaluation_leaves_the_state_of_the_first(info: OptimizerSpec) -> None:
    params, optimizer = build(info)
    others, twin = build(info)
    steps(params, optimizer, UpdatedWeightPrediction([optimizer], 1.0), 3)
    steps(others, twin, None, 3)
    for param, other in zip(params, others, strict=True):
        state = {name: value for name, value in optimizer.state[param].items() if name != PREVIOUS_UPDATE}
        assert state.keys() == twin.state[other].keys()
        for name, value in state.items():
            assert torch.equal(value, twin.state[other][name]), name


@pytest.mark.parametrize("kind", [WeightPrediction, UpdatedWeightPrediction])
def test_the_accumulator_is_what_counts_and_the_weights_come_back(kind: type[Correction]) -> None:
    params, optimizer = build(find("signum"))
    others, twin = build(find("signum"))
    correction = kind([optimizer], 1.0)
    steps(params, optimizer, correction, 1)
    steps(others, twin, None, 1)
    for param, other in zip(params, others, strict=True):
        param.grad = torch.randn_like(param)
        other.grad = param.grad.clone()
    take_step(optimizer, correction, corrected=True)
    twin.step()
    trained = [param.detach().clone() for param in params]
    assert not torch.allclose(trained[0], others[0])
    with correction.newest_weights() as differ:
        assert differ
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param.detach(), other.detach(), rtol=0, atol=1e-6)
    assert all(torch.equal(param, weights) for param, weights in zip(params, trained, strict=True))


def test_other_corrections_count_the_weights_of_training() -> None:
    params, optimizer = build(find("adam"))
    correction = ErrorFeedback([optimizer], 1.0)
    steps(params, optimizer, correction, 3)
    before = params[0].detach().clone()
    with correction.newest_weights() as differ:
        assert not differ and torch.equal(params[0], before)


@pytest.mark.parametrize("kind", CLASSES)
def test_without_delay_nothing_is_predicted(kind: type[Correction]) -> None:
    """Inactive again, as in a synchronous cooldown: the weights are an optimizer's own from the accumulator on."""
    param = Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([param], lr=LR)
    correction = kind([optimizer], 1.0)
    for active in (False, True, False):
        param.grad = torch.ones(2, 2)
        take_step(optimizer, correction, corrected=active)
    # Constant gradients: every correction but prediction adds nothing, and prediction ends at the accumulator.
    expected = 1 - 3 * LR
    if kind is DelayCompensation:
        expected += LR * LR  # the second step's g g (W_1 - W_0) = -lr
    torch.testing.assert_close(param.detach(), torch.full((2, 2), expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("info", specs(), ids=names())
def test_pieces_change_nothing(info: OptimizerSpec, kind: type[Correction]) -> None:
    whole, optimizer = build(info)
    steps(whole, optimizer, kind([optimizer], 1.0), 4)
    single, in_pieces = build(info)
    steps(single, in_pieces, kind([in_pieces], 1.0), 4, piece=1)
    assert all(torch.equal(a, b) for a, b in zip(whole, single, strict=True))
    assert len(in_pieces.param_groups[0]["params"]) == len(single)
    assert list(in_pieces.state) == single
    for param, other in zip(whole, single, strict=True):
        assert optimizer.state[param].keys() == in_pieces.state[other].keys()
        for name, value in optimizer.state[param].items():
            assert value is None or torch.equal(value, in_pieces.state[other][name]), name


class Sizes(Correction):
    """Remembers zeros, and how many elements it was given at once."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().__init__(optimizers)
        self.seen: list[int] = []

    def around(self, optimizer: torch.optim.Optimizer, params: list[Tensor], active: bool) -> Iterator[None]:
        yield
        self.seen.append(sum(param.numel() for param in params))
        remember(optimizer, params, [torch.zeros_like(param) for param in params])


@pytest.mark.parametrize("info", specs(), ids=names())
def test_a_correction_is_given_pieces(info: OptimizerSpec) -> None:
    params, optimizer = build(info)
    sizes = Sizes([optimizer])
    steps(params, optimizer, sizes, 2, piece=32)
    assert sizes.seen == 2 * [param.numel() for param in params]


def test_pieces_hold_what_was_asked_for() -> None:
    first, second = [torch.zeros(3), torch.zeros(4)], [torch.zeros(9), torch.zeros(1)]
    optimizer = torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.2}], lr=0.1)
    sizes = []
    for piece in pieces(optimizer, 7):
        assert piece.params == [param for group in optimizer.param_groups for param in group["params"]]
        sizes.append([param.numel() for param in piece.params])
    assert sizes == [[3, 4], [9], [1]]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]


def test_an_optimizer_that_may_count_by_group_is_one_piece() -> None:
    class Fused(torch.optim.SGD):
        pass

    params = [Parameter(torch.zeros(size)) for size in (3, 4, 9)]
    assert [len(piece.params) for piece in pieces(Fused(params, lr=0.1), 1)] == [3]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_fresh_parameter_beside_a_delayed_one_gets_the_plain_step(kind: type[Correction]) -> None:
    """In one piece, and with its optimizer state: a second evaluation must not step it twice."""
    params, optimizer = build(find("adam"))
    others, twin = build(find("adam"))
    params[0].gradient_delay = 0  # type: ignore[attr-defined]
    steps(params, optimizer, kind([optimizer], 1.0), 3)
    steps(others, twin, None, 3)
    assert torch.equal(params[0], others[0])
    assert all(torch.equal(value, twin.state[others[0]][name]) for name, value in optimizer.state[params[0]].items())


def test_parameters_without_delay_are_left_alone() -> None:
    params, optimizer = build(find("adam"))
    others, twin = build(find("adam"))
    params[0].gradient_delay = 0  # type: ignore[attr-defined]
    steps(params, optimizer, ErrorFeedback([optimizer], 1.0), 3)
    steps(others, twin, None, 3)
    assert torch.equal(params[0], others[0]) and PREVIOUS_UPDATE not in optimizer.state[params[0]]
    assert not torch.allclose(params[1], others[1])


@pytest.mark.parametrize("kind", CLASSES)
def test_parameters_that_are_left_out_get_the_plain_step(kind: type[Correction]) -> None:
    params, optimizer = build(find("adam"))
    others, twin = build(find("adam"))
    leave_out(params[:1])
    steps(params, optimizer, kind([optimizer], 1.0), 3)
    steps(others, twin, None, 3)
    assert torch.equal(params[0], others[0]) and PREVIOUS_UPDATE not in optimizer.state[params[0]]
    assert PREVIOUS_UPDATE in optimizer.state[params[1]]


@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_remembered_is_in_the_optimizers_state(kind: type[Correction]) -> None:
    """Saved and loaded with the optimizer, a run goes on to the same bits."""
    params, optimizer = build(find("adam"))
    original = kind([optimizer], 1.0)
    steps(params, optimizer, original, 3)
    others = [Parameter(param.detach().clone()) for param in params]
    resumed = find("adam").build(others, lr=1.0)
    correction = kind([resumed], 1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors otherwise
    assert all(PREVIOUS_UPDATE in resumed.state[other] for other in others)
    for param, other in zip(params, others, strict=True):
        param.grad = torch.randn_like(param)
        other.grad = param.grad.clone()
    take_step(optimizer, original, corrected=True)
    take_step(resumed, correction, corrected=True)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("strength", [-0.1, math.inf, math.nan])
@pytest.mark.parametrize("kind", CLASSES)
def test_impossible_strengths_are_refused(kind: type[Correction], strength: float) -> None:
    with pytest.raises(ValueError, match=f"{strength}.*finite number, at least 0"):
        kind([], strength)
