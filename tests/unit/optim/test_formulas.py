# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Ten steps of every optimizer beside a twin: the formula of its paper in float64, written with numpy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import Parameter

from megatron_async.optim.algorithms import (
    AdaMuon,
    Adan,
    Mars,
    MarsM,
    Muon,
    NAdam,
    NorMuon,
    Soap,
)
from megatron_async.optim.registry import find

Array = NDArray[np.float64]

STEPS = 10
LR, DECAY = 0.05, 0.1
MATRICES = [(8, 8), (6, 10), (10, 6)]
SHAPES = [*MATRICES, (7,)]

# The five sets of coefficients behind https://leloykun.github.io/ponder/muon-opt-coeffs/, and Jordan's.
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5


def orthogonal(x: Array, coefficients: list[tuple[float, float, float]] = QUINTIC) -> Array:
    """Newton-Schulz by what it does to singular values: an odd polynomial for each step."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(s)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def gradients(shape: tuple[int, ...], scale: float = 1.0) -> list[Array]:
    generator = np.random.default_rng(len(shape) * 100 + shape[0])
    return [(scale * generator.standard_normal(shape)).astype(np.float32).astype(np.float64) for _ in range(STEPS)]


def run(optimizer: torch.optim.Optimizer, param: Parameter, grads: list[Array]) -> Array:
    for grad in grads:
        param.grad = torch.from_numpy(grad).float()
        optimizer.step()
    return param.detach().double().numpy()


def start(shape: tuple[int, ...]) -> Parameter:
    return Parameter(torch.randn(shape))


def assert_equal_weights(ours: Array, twin: Array, tolerance: float = 1e-6) -> None:
    """To 1e-6 of the largest weight, where steps are of the size of weights."""
    np.testing.assert_allclose(ours, twin, rtol=tolerance, atol=tolerance * np.abs(twin).max())


def adam_direction(m: Array, v: Array, t: int, betas: tuple[float, float]) -> Array:
    return m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + 1e-8)


# Elementwise optimizers


@pytest.mark.parametrize("shape", SHAPES)
def test_adamw_of_the_registry(shape: tuple[int, ...]) -> None:
    param = start(shape)
    w = param.detach().double().numpy()
    m = v = np.zeros(shape)
    grads = gradients(shape)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = (1 - LR * DECAY) * w - LR * adam_direction(m, v, t, (0.9, 0.95))
    assert_equal_weights(run(find("adam").build([param], lr=LR), param, grads), w)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("proximal", [False, True])
def test_adan(shape: tuple[int, ...], proximal: bool) -> None:
    param = start(shape)
    w = param.detach().double().numpy()
    m = d = n = np.zeros(shape)
    grads = gradients(shape)
    last = grads[0]
    for t, g in enumerate(grads, 1):
        m = 0.98 * m + 0.02 * g
        d = 0.92 * d + 0.08 * (g - last)
        n = 0.99 * n + 0.01 * (g + 0.92 * (g - last)) ** 2
        last = g
        numerator = m / (1 - 0.98**t) + 0.92 * d / (1 - 0.92**t)
        step = LR * numerator / (np.sqrt(n / (1 - 0.99**t)) + 1e-8)
        w = (w - step) / (1 + LR * DECAY) if proximal else (1 - LR * DECAY) * w - step
    optimizer = Adan([param], lr=LR, weight_decay=DECAY, proximal=proximal)
    assert_equal_weights(run(optimizer, param, grads), w)


@pytest.mark.parametrize("scale", [0.01, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("shape", MATRICES)
def test_mars_on_matrices(shape: tuple[int, ...], scale: float) -> None:
    param = start(shape)
    w = param.detach().double().numpy()
    m = v = last = np.zeros(shape)
    grads = gradients(shape, scale)
    norms = []
    for t, g in enumerate(grads, 1):
        c = g + 0.025 * 0.95 / 0.05 * (g - last)
        last = g
        norms.append(float(np.sqrt((c**2).sum())))
        c = c / max(1.0, norms[-1])
        m, v = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c * c
        w = (1 - LR * DECAY) * w - LR * adam_direction(m, v, t, (0.95, 0.99))
    assert (max(norms) < 1) == (scale == 0.01), "the two cases must differ in clipping"
    assert_equal_weights(run(Mars([param], lr=LR, weight_decay=DECAY), param, grads), w)


def test_mars_on_vectors_is_adamw() -> None:
    param, reference = start((7,)), Parameter(torch.empty(7))
    reference.data.copy_(param.detach())
    grads = gradients((7,))
    ours = run(Mars([param], lr=LR, weight_decay=DECAY), param, grads)
    adamw = torch.optim.AdamW([reference], lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    assert_equal_weights(ours, run(adamw, reference, grads))


def test_mars_without_variance_reduction_is_adamw() -> None:
    param, reference = start((6, 10)), Parameter(torch.empty(6, 10))
    reference.data.copy_(param.detach())
    grads = gradients((6, 10), 0.01)
    ours = run(Mars([param], lr=LR, weight_decay=DECAY, gamma=0.0), param, grads)
    adamw = torch.optim.AdamW([reference], lr=LR, betas=(0.95, 0.99), weight_decay=DECAY)
    assert_equal_weights(ours, run(adamw, reference, grads))


MOMENTUM_RULES: dict[str, Callable[[Array, Array, Array], tuple[Array, Array]]] = {
    "signum": lambda w, m, g: ((1 - LR * DECAY) * w - LR * np.sign(0.95 * m + 0.05 * g), 0.95 * m + 0.05 * g),
    "lion": lambda w, m, g: ((1 - LR * 0.5) * w - LR * np.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g),
    "sgd": lambda w, m, g: (w - LR * (0.9 * m + g + DECAY * w), 0.9 * m + g + DECAY * w),
}
"""Weights, momentum and gradient -> new weights and momentum."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MOMENTUM_RULES)
def test_optimizers_with_one_momentum(name: str, shape: tuple[int, ...]) -> None:
    param = start(shape)
    w, m = param.detach().double().numpy(), np.zeros(shape)
    grads = gradients(shape)
    for g in grads:
        w, m = MOMENTUM_RULES[name](w, m, g)
    assert_equal_weights(run(find(name).build([param], lr=LR), param, grads), w)


@pytest.mark.parametrize("shape", SHAPES)
def test_nadam(shape: tuple[int, ...]) -> None:
    param = start(shape)
    w = param.detach().double().numpy()
    m = v = np.zeros(shape)
    product = 1.0
    grads = gradients(shape)
    for t, g in enumerate(grads, 1):
        mu, mu_next = (0.99 * (1 - 0.5 * 0.96 ** (step * 0.004)) for step in (t, t + 1))
        product *= mu
        m, v = 0.99 * m + 0.01 * g, 0.999 * v + 0.001 * g * g
        direction = mu_next * m / (1 - product * mu_next) + (1 - mu) * g / (1 - product)
        w = (1 - LR * DECAY) * w - LR * direction / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    assert_equal_weights(run(NAdam([param], lr=LR, weight_decay=DECAY), param, grads), w)


# Matrix optimizers


@pytest.mark.parametrize("coefficients", ["quintic", "simple"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", MATRICES)
def test_muon(shape: tuple[int, int], nesterov: bool, coefficients: str) -> None:
    param = start(shape)
    w = param.detach().double().numpy()
    m = np.zeros(shape)
    grads = gradients(shape)
    for g in grads:
        m = 0.95 * m + g  # Jordan's sum, not the moving average
        direction = 0.95 * m + g if nesterov else m
        o = orthogonal(direction, QUINTIC if coefficients == "quintic" else SIMPLE)
        w = (1 - LR * DECAY) * w - LR * 0.2 * math.sqrt(max(shape)) * o
    optimizer = Muon(
        [param],
        lr=LR,
        weight_decay=DECAY,
        nesterov=nesterov,
        coefficient_type=coefficients,  # type: ignore[arg-type]
        fp32_matmul_prec="highest",
    )
    assert_equal_weights(run(optimizer, param, grads), w)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", MATRICES)
def test_normuon(shape: tuple[int, int], nesterov: bool) -> None:
    param = start(shape)
    w = param.detach().double().numpy()
    m, v = np.zeros(shape), np.zeros(shape[0])
    grads = gradients(shape)
    for g in grads:
        m = 0.95 * m + 0.05 * g
        o = orthogonal(0.95 * m + 0.05 * g if nesterov else m)
        n = np.empty(shape)
        for row in range(shape[0]):
            v[row] = 0.95 * v[row] + 0.05 * sum(value * value for value in o[row]) / shape[1]
            n[row] = o[row] / (math.sqrt(v[row]) + 1e-8)
        factor = 0.2 * math.sqrt(shape[0] * shape[1]) / np.linalg.norm(n)
        w = (1 - LR * DECAY) * w - LR * factor * n
    optimizer = NorMuon([param], lr=LR, weight_decay=DECAY, nesterov=nesterov, fp32_matmul_prec="highest")
    assert_equal_weights(run(optimizer, param, grads), w)


@pytest.mark.parametrize("public_code", [False, True], ids=["paper", "public code"])
@pytest.mark.parametrize("shape", MATRICES)
def test_adamuon(shape: tuple[int, int], public_code: bool) -> None:
    """The algorithm of its paper, and the authors' code: no sign, Nesterov momentum, a corrected second moment."""
    param = start(shape)
    w = param.detach().double().numpy()
    m = v = np.zeros(shape)
    grads = gradients(shape)
    beta2 = 0.999 if public_code else 0.95
    for step, g in enumerate(grads, start=1):
        m = 0.95 * m + g  # the paper's sum
        o = orthogonal(0.95 * m + g if public_code else np.sign(m))
        v = beta2 * v + (1 - beta2) * o * o
        n = o / (np.sqrt(v / (1 - beta2**step) if public_code else v) + 1e-8)
        w = w - LR * (0.2 * math.sqrt(n.size) / np.linalg.norm(n) * n + DECAY * w)
    variant = {"sign": False, "nesterov": True, "beta2": beta2} if public_code else {}
    optimizer = AdaMuon([param], lr=LR, weight_decay=DECAY, fp32_matmul_prec="highest", **variant)
    # Without the sign, small elements of O, which fp32 rounds, are divided by their own size.
    assert_equal_weights(run(optimizer, param, grads), w, 1e-5 if public_code else 1e-6)


@pytest.mark.parametrize("scale", [0.01, 1.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("shape", MATRICES)
def test_mars_m(shape: tuple[int, int], scale: float) -> None:
    param = start(shape)
    w = param.detach().double().numpy()
    m = last = np.zeros(shape)
    grads = gradients(shape, scale)
    for g in grads:
        c = g + 0.025 * 0.95 / 0.05 * (g - last)
        last = g
        m = 0.95 * m + 0.05 * c / max(1.0, float(np.linalg.norm(c)))
        w = (1 - LR * DECAY) * w - LR * 0.2 * math.sqrt(max(shape)) * orthogonal(m)
    optimizer = MarsM([param], lr=LR, weight_decay=DECAY, fp32_matmul_prec="highest")
    assert_equal_weights(run(optimizer, param, grads), w)


def test_mars_m_without_variance_reduction_is_muon() -> None:
    ours, muons = start((6, 10)), Parameter(torch.empty(6, 10))
    muons.data.copy_(ours.detach())
    grads = gradients((6, 10), 0.01)
    np.testing.assert_array_equal(
        run(MarsM([ours], lr=LR, gamma=0.0), ours, grads), run(Muon([muons], lr=LR), muons, grads)
    )


# SOAP


@pytest.mark.parametrize("frequency", [1, 3, 10])
@pytest.mark.parametrize("shape", MATRICES)
def test_soap(shape: tuple[int, int], frequency: int) -> None:
    param = start(shape)
    w = param.detach().double().numpy()
    grads = gradients(shape)
    optimizer = Soap([param], lr=LR, weight_decay=DECAY, precondition_frequency=frequency)
    run(optimizer, param, grads[:1])
    np.testing.assert_array_equal(param.detach().double().numpy(), w)

    # The longer side's factor has rank 6 of 10 in the first step, and any basis of its null space will do. So
    # the twin takes the optimizer's bases, once they are seen to be right.
    left, right = 0.05 * grads[0] @ grads[0].T, 0.05 * grads[0].T @ grads[0]
    q_left, q_right = (optimizer.state[param][name].double().numpy() for name in ("Q_L", "Q_R"))
    for factor, basis in ((left, q_left), (right, q_right)):
        np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), rtol=0, atol=1e-5)
        eigenvalues = np.sort(np.linalg.eigvalsh(factor))[::-1]
        np.testing.assert_allclose(basis.T @ factor @ basis, np.diag(eigenvalues), rtol=0, atol=1e-5)

    m = v = np.zeros(shape)
    for t, g in enumerate(grads[1:], 1):
        m = 0.95 * m + 0.05 * g
        v = 0.95 * v + 0.05 * (q_left.T @ g @ q_right) ** 2
        direction = adam_direction(q_left.T @ m @ q_right, v, t, (0.95, 0.95))
        w = (1 - LR * DECAY) * w - LR * q_left @ direction @ q_right.T
        left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
        if t % frequency == 0:
            row_order = np.argsort(-np.diag(q_left.T @ left @ q_left))
            column_order = np.argsort(-np.diag(q_right.T @ right @ q_right))
            v = v[row_order][:, column_order]
            q_left = np.linalg.qr(left @ q_left[:, row_order]).Q
            q_right = np.linalg.qr(right @ q_right[:, column_order]).Q
    assert_equal_weights(run(optimizer, param, grads[1:]), w)


def test_soap_in_the_identity_basis_is_adamw() -> None:
    param = start((6, 10))
    grads = gradients((6, 10))
    optimizer = Soap([param], lr=LR, weight_decay=DECAY, precondition_frequency=100)
    run(optimizer, param, grads[:1])
    optimizer.state[param]["Q_L"].copy_(torch.eye(6))
    optimizer.state[param]["Q_R"].copy_(torch.eye(10))
    reference = Parameter(param.detach().clone())
    adamw = torch.optim.AdamW([reference], lr=LR, betas=(0.95, 0.95), weight_decay=DECAY)
    assert_equal_weights(run(optimizer, param, grads[1:]), run(adamw, reference, grads[1:]))


def test_soap_turns_with_the_parameter() -> None:
    """Rotating weights and gradients rotates the trajectory, which is what sets SOAP apart from Adam."""
    rotation = torch.linalg.qr(torch.randn(8, 8)).Q
    plain, turned = start((8, 8)), Parameter(torch.empty(8, 8))
    turned.data.copy_(rotation @ plain.detach())
    grads = gradients((8, 8))
    straight = run(Soap([plain], lr=LR), plain, grads)
    rotated = run(Soap([turned], lr=LR), turned, [rotation.double().numpy() @ grad for grad in grads])
    np.testing.assert_allclose(rotated, rotation.double().numpy() @ straight, rtol=0, atol=1e-4)
