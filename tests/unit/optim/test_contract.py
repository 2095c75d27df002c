# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What every optimizer promises: early state, resuming, no waiting for the device, clear refusals."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async.optim.algorithms import AdaMuon, Adan, Mars, MarsM, Muon, NAdam, NorMuon, Signum, Soap
from megatron_async.optim.hyperparameters import COUNT, DECAY, NON_NEGATIVE, POSITIVE, choice, several
from megatron_async.optim.registry import OptimizerSpec, find, names, register, specs

OURS = [AdaMuon, Adan, Mars, MarsM, Muon, NAdam, NorMuon, Signum, Soap]
MATRIX_ONLY = [AdaMuon, MarsM, Muon, NorMuon, Soap]


def parameters(spec: OptimizerSpec) -> list[Parameter]:
    shapes: list[tuple[int, ...]] = [(6, 10), (10, 6)] + ([(5,)] if spec.scope != "matrix" else [])
    return [Parameter(torch.randn(shape)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer, param: Parameter) -> dict[str, Any]:
    return dict(optimizer.state[param])


@pytest.mark.parametrize("optimizer", OURS)
def test_allocated_state_is_that_of_a_step(optimizer: Any) -> None:
    eager, lazy = Parameter(torch.randn(6, 10)), Parameter(torch.randn(6, 10))
    early, late = optimizer([eager]), optimizer([lazy])
    early.init_states()
    train(late, [lazy], 1, seed=0)
    before, after = state_of(early, eager), state_of(late, lazy)
    assert list(before) == list(after)
    for name, value in before.items():
        assert (value.shape, value.dtype, value.device) == (
            after[name].shape,
            after[name].dtype,
            after[name].device,
        )


@pytest.mark.parametrize("optimizer", OURS)
def test_allocating_state_early_changes_nothing(optimizer: Any) -> None:
    weights = torch.randn(6, 10)
    trajectories = []
    for allocate in (False, True):
        param = Parameter(weights.clone())
        built = optimizer([param])
        if allocate:
            built.init_states()
            assert torch.equal(param.detach(), weights)
        train(built, [param], 3, seed=0)
        trajectories.append(param.detach())
    assert torch.equal(*trajectories)


@pytest.mark.parametrize("optimizer", OURS)
def test_state_of_others_does_not_stand_in_the_way(optimizer: Any) -> None:
    """A correction keeps its own buffer in the state, and may have done so before the first step."""
    param = Parameter(torch.randn(6, 10))
    built = optimizer([param])
    kept = torch.ones(6, 10)
    built.state[param]["previous_update"] = kept
    train(built, [param], 2, seed=0)
    assert built.state[param]["previous_update"] is kept


@pytest.mark.parametrize("optimizer", MATRIX_ONLY + [Adan, Mars, Signum])
def test_megatrons_way_of_allocating_state(optimizer: Any) -> None:
    param = Parameter(torch.randn(6, 10))
    built = optimizer([param])
    built._init_group(built.param_groups[0], skip_non_grad_params=False)
    assert built.state[param]


@pytest.mark.parametrize("spec", specs(), ids=names())
def test_resuming_gives_the_same_bits(spec: OptimizerSpec) -> None:
    params = parameters(spec)
    copies = [Parameter(param.detach().clone()) for param in params]
    straight, first = spec.build(params, lr=0.01), spec.build(copies, lr=0.01)
    train(straight, params, 12, seed=0)

    train(first, copies, 12, seed=0)  # 12 steps: SOAP has refreshed its basis
    saved = first.state_dict()
    resumed = spec.build(copies, lr=0.5)
    resumed.load_state_dict(saved)
    for param, copy in zip(params, copies, strict=True):
        for name, value in straight.state[param].items():
            assert torch.equal(value, resumed.state[copy][name]) and value.dtype == torch.float32
    train(straight, params, 3, seed=1)
    train(resumed, copies, 3, seed=1)
    assert all(torch.equal(param, copy) for param, copy in zip(params, copies, strict=True))


@pytest.mark.parametrize("spec", specs(), ids=names())
def test_parameters_without_a_gradient_stay(spec: OptimizerSpec) -> None:
    params = parameters(spec)
    idle = params[0].detach().clone()
    optimizer = spec.build(params, lr=0.1)
    for _ in range(2):
        for param in params[1:]:
            param.grad = torch.randn(param.shape)
        optimizer.step()
    assert torch.equal(params[0], idle) and not optimizer.state[params[0]]


@pytest.mark.parametrize("spec", specs(), ids=names())
def test_a_step_leaves_the_gradients_alone(spec: OptimizerSpec) -> None:
    params = parameters(spec)
    optimizer = spec.build(params, lr=0.1)
    for _ in range(2):
        grads = [torch.randn(param.shape) for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True) if p.grad is not None)


@pytest.mark.parametrize("spec", [spec for spec in specs() if spec.name != "sgd"], ids=lambda spec: spec.name)
def test_weight_decay_is_decoupled_and_takes_the_plain_learning_rate(spec: OptimizerSpec) -> None:
    """With and without decay the weights differ by lr wd W after a step, and by nothing else."""
    weights = torch.randn(6, 10)
    ends = []
    for decay in (0.0, 0.5):
        param = Parameter(weights.clone())
        optimizer = spec.build([param], lr=0.0, weight_decay=decay)
        train(optimizer, [param], 2, seed=0)
        optimizer.param_groups[0]["lr"] = 0.1
        train(optimizer, [param], 1, seed=1)
        ends.append(param.detach())
    torch.testing.assert_close(ends[0] - ends[1], 0.05 * weights, rtol=1e-4, atol=1e-6)


class ReadsOfTheDevice(TorchDispatchMode):
    """Collects the tensors whose values the host asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.read.append(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[list[Tensor]]:
    with ReadsOfTheDevice() as mode:
        yield mode.read


def test_reads_of_the_device_are_noticed() -> None:
    with reads() as read:
        assert not (torch.ones(3).norm() > 10)
    assert len(read) == 1


@pytest.mark.parametrize("spec", specs(), ids=names())
def test_a_step_reads_nothing_but_step_counters(spec: OptimizerSpec) -> None:
    params = parameters(spec)
    optimizer = spec.build(params, lr=0.1)
    train(optimizer, params, 1, seed=0)
    with reads() as read:
        train(optimizer, params, 1, seed=1)
    on_host = [
        optimizer.state[p][name] for p in params for name in ("step", "mu_product") if name in optimizer.state[p]
    ]
    addresses = {tensor.data_ptr() for tensor in on_host}
    assert all(tensor.data_ptr() in addresses for tensor in read)


def test_nadam_keeps_its_scalar_on_the_host_when_loading() -> None:
    """torch moves the loaded scalar to the parameter's device; the meta device stands for a GPU here."""
    param = Parameter(torch.randn(4, 4))
    optimizer = NAdam([param])
    train(optimizer, [param], 2, seed=0)
    elsewhere = NAdam([Parameter(torch.empty(4, 4, device="meta"))])
    with pytest.raises(NotImplementedError, match="meta"):  # there is nothing to bring back from it
        elsewhere.load_state_dict(optimizer.state_dict())
    again = NAdam([param])
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[param]["mu_product"], optimizer.state[param]["mu_product"])


@pytest.mark.parametrize("optimizer", OURS)
def test_closures_are_evaluated_with_gradients(optimizer: Any) -> None:
    param = Parameter(torch.randn(4, 4))
    built = optimizer([param])

    def closure() -> Tensor:
        built.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    before = param.detach().clone()
    assert built.step(closure).item() == pytest.approx(before.square().sum().item())
    assert param.grad is not None


WRONG: dict[type, dict[str, object]] = {
    Muon: {"lr": -1.0, "momentum": 1.0, "num_ns_steps": 0, "scale_mode": "rows"},
    NorMuon: {"weight_decay": -0.1, "beta2": 1.5, "eps": 0.0, "nesterov": "yes"},
    AdaMuon: {"beta2": -0.1, "eps": -1e-8, "coefficient_type": "septic"},
    MarsM: {"gamma": -1.0, "momentum": float("nan"), "fp32_matmul_prec": "bf16"},
    Adan: {"betas": (0.9, 0.99), "eps": 0.0, "proximal": 1.5},
    Mars: {"betas": (0.9, 1.0), "betas_1d": 0.9, "gamma": float("inf")},
    NAdam: {"lr": float("nan"), "betas": (-0.1, 0.9), "momentum_decay": -1.0},
    Signum: {"lr": -1e-3, "momentum": 1.0, "weight_decay": -1.0},
    Soap: {"precondition_frequency": 2.5, "shampoo_beta": 1.0, "betas": (0.9, 0.9, 0.9)},
}


@pytest.mark.parametrize(("optimizer", "wrong"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_all_wrong_hyperparameters_are_named_at_once(optimizer: Any, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError) as error:
        optimizer([Parameter(torch.randn(4, 4))], **wrong)
    message = str(error.value)
    assert message.startswith(f"{optimizer.__name__}: ")
    named = re.findall(r"(?:: |; )(\w+) = (.*?), allowed: ", message)
    assert sorted(named) == sorted((name, repr(value)) for name, value in wrong.items())


@pytest.mark.parametrize("spec", specs(), ids=names())
def test_hyperparameters_are_keyword_only_checked_and_explained(spec: OptimizerSpec) -> None:
    for own in fields(spec.hyperparameters):
        assert own.kw_only and own.metadata["help"] and own.metadata["source"], own.name
        assert own.default in own.metadata["rule"] or own.default is None, own.name
    with pytest.raises(TypeError, match="unexpected keyword argument 'betta'"):
        spec.build([Parameter(torch.randn(4, 4))], betta=0.9)


def test_rules_know_their_ends() -> None:
    values = (0.0, 0, 0.5, 1.0, -0.1, float("nan"), True, "0.5", None)
    assert [value in DECAY for value in values] == [True] * 3 + [False] * 6
    assert [value in NON_NEGATIVE for value in values] == [True] * 4 + [False] * 5
    assert [value in POSITIVE for value in values] == [False, False, True, True] + [False] * 5
    assert float("inf") not in NON_NEGATIVE and float("inf") not in POSITIVE
    assert [value in COUNT for value in (1, 7, 0, 1.0, True)] == [True, True, False, False, False]
    assert [value in several(2, DECAY) for value in ((0, 0.9), [0.1, 0.2], (0.1,), (0.1, 1.0), 0.1)] == (
        [True, True, False, False, False]
    )
    assert "a" in choice("a", "b") and "c" not in choice("a", "b")
    assert [str(rule) for rule in (choice("a", "b"), several(2, DECAY))] == ["a or b", "2 values in [0, 1)"]


@pytest.mark.parametrize("optimizer", OURS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_that_are_no_master_weights_are_refused(optimizer: Any, dtype: torch.dtype) -> None:
    param = Parameter(torch.randn(4, 4, dtype=dtype))
    param.grad = torch.randn(4, 4, dtype=dtype)
    with pytest.raises(ValueError, match=rf"fp32 master weights.*\(4, 4\).*{dtype}"):
        optimizer([param]).step()


@pytest.mark.parametrize("optimizer", MATRIX_ONLY)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_matrix_optimizers_refuse_other_shapes(optimizer: Any, shape: tuple[int, ...]) -> None:
    param = Parameter(torch.randn(shape))
    param.grad = torch.randn(shape)
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        optimizer([param]).step()


# The registry


def test_the_registry_knows_every_optimizer_of_the_command_line() -> None:
    from_megatron = {"adam", "sgd", "muon", "soap", "lion"}
    ours = {"normuon", "adamuon", "nadam", "adan", "mars", "mars-m", "signum"}
    assert set(names()) == from_megatron | ours and names() == sorted(names())
    assert find("mars-m").optimizer is MarsM
    with pytest.raises(ValueError, match="'adamw' is unknown; choose one of adam, "):
        find("adamw")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'signum' is registered already"):
        register(replace(find("adan"), name="signum"))


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7,)])
@pytest.mark.parametrize("spec", specs(), ids=names())
def test_the_registry_describes_the_state_that_is_there(spec: OptimizerSpec, shape: tuple[int, ...]) -> None:
    if spec.scope == "matrix" and len(shape) == 1:
        return
    param = Parameter(torch.randn(shape))
    optimizer = spec.build([param], lr=0.1)
    train(optimizer, [param], 1, seed=0)
    buffers = {name: value for name, value in optimizer.state[param].items() if value.ndim > 0}
    assert set(buffers) <= set(spec.state) and (len(shape) == 1 or set(buffers) == set(spec.state))
    assert spec.state_elements(shape) == sum(buffer.numel() for buffer in buffers.values())


def test_state_is_told_in_floats_for_each_element() -> None:
    told = {spec.name: spec.state_per_element for spec in specs()}
    assert told["muon"] == "1" and told["adam"] == "2" and told["mars"] == "3" and told["adan"] == "4"
    assert told["normuon"] == "1 + 1/columns"
    assert told["soap"] == "2 + 2 rows/columns + 2 columns/rows"


@pytest.mark.parametrize("spec", specs(), ids=names())
def test_an_optimizer_is_described_in_full(spec: OptimizerSpec) -> None:
    text = "\n".join(spec.text)
    assert text.split("\n")[0].endswith(".")
    assert "\n    W = " in text and "\nLearning rate: " in text and "\nLinks: https://" in text
