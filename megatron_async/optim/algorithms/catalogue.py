# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Every optimizer by its name on the command line: update, state, hyper-parameters and their sources.

"The paper" in the sources is arXiv 2606.30634. Its appendix E gives few settings besides learning rates;
where it gives none, the value is that of the optimizer's own paper or code.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from emerging_optimizers.scalar_optimizers import Lion
from torch.optim.optimizer import ParamsT

from megatron_async.optim.algorithms import ranges
from megatron_async.optim.algorithms.adamuon import AdaMuon
from megatron_async.optim.algorithms.adan import Adan
from megatron_async.optim.algorithms.mars import Mars
from megatron_async.optim.algorithms.mars_m import MarsM
from megatron_async.optim.algorithms.muon import Muon
from megatron_async.optim.algorithms.nadam import NAdam
from megatron_async.optim.algorithms.normuon import NorMuon
from megatron_async.optim.algorithms.ranges import Rule
from megatron_async.optim.algorithms.signum import Signum
from megatron_async.optim.algorithms.soap import Soap

Kind = Literal["matrix", "elementwise"]
Extent = Literal["element", "row", "left", "right"]
"""Size of a state buffer of a matrix: rows x columns, rows, rows x rows, columns x columns."""

_PER_ELEMENT: dict[Extent, str] = {
    "element": "1",
    "row": "1/columns",
    "left": "rows/columns",
    "right": "columns/rows",
}


class Hyperparameter(NamedTuple):
    """A constructor argument: its default, the values it may take, where the default comes from."""

    default: object
    range: str
    source: str


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """What there is to know about an optimizer.

    Attributes:
        name: value of ``--optimizer``.
        summary: one line.
        update: the formula, one line for each assignment.
        kind: "matrix" steps on the hidden 2-D weights and leaves the rest to AdamW; "elementwise" on all.
        whole_tensors: whether a step needs a whole tensor at once; sharding within a tensor then changes it.
        optimizer: the class.
        hyperparameters: by constructor argument. The learning rate is missing: it is always given.
        learning_rate: advice about it.
        state: name and size of each fp32 buffer; step counters are left out.
        links: papers and code.
        rules: the values that each hyper-parameter may take.
    """

    name: str
    summary: str
    update: tuple[str, ...]
    kind: Kind
    optimizer: Callable[..., torch.optim.Optimizer]
    hyperparameters: Mapping[str, Hyperparameter]
    state: Mapping[str, Extent]
    learning_rate: str
    links: tuple[str, ...]
    rules: Mapping[str, Rule]
    whole_tensors: bool = False

    def build(self, params: ParamsT, *, lr: float, **overrides: Any) -> torch.optim.Optimizer:
        """The optimizer with the defaults given here, whatever the class' own are."""
        defaults = {name: parameter.default for name, parameter in self.hyperparameters.items()}
        return self.optimizer(params, lr=lr, **{**defaults, **overrides})

    def state_elements(self, rows: int, columns: int) -> int:
        """Elements of the state of a (rows, columns) matrix."""
        sizes = {"element": rows * columns, "row": rows, "left": rows * rows, "right": columns * columns}
        return sum(sizes[extent] for extent in self.state.values())

    @property
    def state_per_element(self) -> str:
        """Size of the state for each element of a matrix, such as "1 + 1/columns"."""
        extents = list(self.state.values())
        terms = [(extents.count(extent), text) for extent, text in _PER_ELEMENT.items() if extent in extents]
        return " + ".join(
            str(count) if text == "1" else text if count == 1 else f"{count} {text}" for count, text in terms
        )


def _hyperparameters(
    optimizer: type[Muon | Soap | Adan | Mars | NAdam | Signum], sources: Mapping[str, str]
) -> dict[str, Hyperparameter]:
    """Those of a class of ours: defaults from its signature, ranges from its rules."""
    defaults = {name: argument.default for name, argument in inspect.signature(optimizer).parameters.items()}
    return {
        name: Hyperparameter(defaults[name], str(rule), sources[name])
        for name, rule in optimizer.RULES.items()
        if name != "lr"
    }


_Given = Sequence[tuple[str, object, Rule, str]]


def _given(values: _Given) -> dict[str, Hyperparameter]:
    """Those of a class from elsewhere."""
    return {name: Hyperparameter(default, str(rule), source) for name, default, rule, source in values}


def _rules(values: _Given) -> dict[str, Rule]:
    return {name: rule for name, _, rule, _ in values}


_COMMON_DECAY = "the paper, E: 0.1"
_EPS = "Adam, arXiv 1412.6980"
_AROUND_ADAMW = "near AdamW's (the paper, E)"
_NEWTON_SCHULZ = {
    "coefficient_type": "emerging-optimizers' default; https://leloykun.github.io/ponder/muon-opt-coeffs/",
    "num_ns_steps": "https://kellerjordan.github.io/posts/muon/",
    "fp32_matmul_prec": "bf16 products, https://kellerjordan.github.io/posts/muon/",
}
_MUON = {
    "momentum": "the paper, 2.1; it also uses 0.99",
    "weight_decay": _COMMON_DECAY,
    "nesterov": "the paper, algorithm 2; almost no effect for Muon (A.1)",
    "scale_mode": "update RMS 0.2: Moonlight, arXiv 2502.16982, and the paper, 2.1",
    **_NEWTON_SCHULZ,
}

_ADAM: _Given = [
    ("betas", (0.9, 0.95), ranges.Several(2, ranges.DECAY), "the paper, 2.1"),
    ("eps", 1e-8, ranges.POSITIVE, _EPS),
    ("weight_decay", 0.1, ranges.NON_NEGATIVE, _COMMON_DECAY),
]
_SGD: _Given = [
    ("momentum", 0.9, ranges.DECAY, "Megatron-LM's default"),
    ("weight_decay", 0.1, ranges.NON_NEGATIVE, _COMMON_DECAY),
]
_LION: _Given = [
    ("betas", (0.9, 0.99), ranges.Several(2, ranges.DECAY), "arXiv 2302.06675, section 5"),
    ("weight_decay", 0.5, ranges.NON_NEGATIVE, "the paper, E"),
]
OPTIMIZERS: tuple[OptimizerInfo, ...] = (
    OptimizerInfo(
        name="adam",
        summary="AdamW: moving averages of the gradient and its square, decoupled weight decay",
        update=(
            "m = beta1 m + (1 - beta1) G",
            "v = beta2 v + (1 - beta2) G²",
            "W = (1 - lr wd) W - lr m̂ / (√v̂ + eps)",
        ),
        kind="elementwise",
        optimizer=torch.optim.AdamW,
        hyperparameters=_given(_ADAM),
        rules=_rules(_ADAM),
        state={"exp_avg": "element", "exp_avg_sq": "element"},
        learning_rate="4e-3 for 135M, 2e-3 for 360M parameters (the paper, E)",
        links=("https://arxiv.org/abs/1711.05101",),
    ),
    OptimizerInfo(
        name="sgd",
        summary="Stochastic gradient descent with momentum; its weight decay is part of the gradient",
        update=("m = mu m + G + wd W", "W = W - lr m"),
        kind="elementwise",
        optimizer=torch.optim.SGD,
        hyperparameters=_given(_SGD),
        rules=_rules(_SGD),
        state={"momentum_buffer": "element"},
        learning_rate="not in the paper; for tests and baselines",
        links=("https://proceedings.mlr.press/v28/sutskever13.html",),
    ),
    OptimizerInfo(
        name="muon",
        summary="Orthogonalized momentum",
        update=("M = mu M + (1 - mu) G", "W = (1 - lr wd) W - lr 0.2 √max(rows, columns) orthogonalize(M)"),
        kind="matrix",
        whole_tensors=True,
        optimizer=Muon,
        rules=Muon.RULES,
        hyperparameters=_hyperparameters(Muon, _MUON),
        state={"momentum_buffer": "element"},
        learning_rate=f"{_AROUND_ADAMW}; 2.25e-3 for 10B MoE (5)",
        links=("https://kellerjordan.github.io/posts/muon/", "https://arxiv.org/abs/2502.16982"),
    ),
    OptimizerInfo(
        name="normuon",
        summary="Muon with an adaptive step size for each neuron",
        update=(
            "M = mu M + (1 - mu) G",
            "O = orthogonalize(mu M + (1 - mu) G)",
            "v = beta2 v + (1 - beta2) mean over columns (O²)",
            "N = O / (√v + eps)",
            "W = (1 - lr wd) W - lr 0.2 √(rows columns) / ‖N‖ N",
        ),
        kind="matrix",
        whole_tensors=True,
        optimizer=NorMuon,
        rules=NorMuon.RULES,
        hyperparameters=_hyperparameters(
            NorMuon,
            {
                **_MUON,
                "nesterov": "the authors' code; clearly helps NorMuon (the paper, A.1)",
                "beta2": "the authors' code",
                "eps": "https://github.com/microsoft/dion",
            },
        ),
        state={"momentum_buffer": "element", "moment2_buffer": "row"},
        learning_rate=_AROUND_ADAMW,
        links=("https://arxiv.org/abs/2510.05491", "https://github.com/zichongli5/NorMuon"),
    ),
    OptimizerInfo(
        name="adamuon",
        summary="Muon of the momentum's sign with an adaptive step size for each element",
        update=(
            "M = mu M + (1 - mu) G",
            "O = orthogonalize(sign(M))",
            "V = beta2 V + (1 - beta2) O²",
            "N = O / (√V + eps)",
            "W = (1 - lr wd) W - lr 0.2 √(rows columns) / ‖N‖ N",
        ),
        kind="matrix",
        whole_tensors=True,
        optimizer=AdaMuon,
        rules=AdaMuon.RULES,
        hyperparameters=_hyperparameters(
            AdaMuon,
            {
                **_MUON,
                "nesterov": "arXiv 2507.11005, the algorithm",
                "beta2": "arXiv 2507.11005: the momentum's",
                "eps": "arXiv 2507.11005",
            },
        ),
        state={"momentum_buffer": "element", "moment2_buffer": "element"},
        learning_rate=_AROUND_ADAMW,
        links=("https://arxiv.org/abs/2507.11005", "https://github.com/Chongjie-Si/AdaMuon"),
    ),
    OptimizerInfo(
        name="soap",
        summary="Adam in the eigenbasis of Shampoo's factors; the first step only measures",
        update=(
            "m = beta1 m + (1 - beta1) G",
            "v = beta2 v + (1 - beta2) (Q_Lᵀ G Q_R)²",
            "W = (1 - lr wd) W - lr Q_L [Q_Lᵀ m̂ Q_R / (√v̂ + eps)] Q_Rᵀ",
            "L = beta L + (1 - beta) G Gᵀ, R = beta R + (1 - beta) Gᵀ G",
            "every few steps: Q_L = QR(L Q_L), Q_R = QR(R Q_R)",
        ),
        kind="matrix",
        whole_tensors=True,
        optimizer=Soap,
        rules=Soap.RULES,
        hyperparameters=_hyperparameters(
            Soap,
            {
                "betas": "arXiv 2409.11321",
                "shampoo_beta": "arXiv 2409.11321: Adam's beta2",
                "eps": _EPS,
                "weight_decay": _COMMON_DECAY,
                "precondition_frequency": "arXiv 2409.11321; longer widens the gap slightly (the paper, A.1)",
                "fp32_matmul_prec": "emerging-optimizers' default",
            },
        ),
        state={
            "exp_avg": "element",
            "exp_avg_sq": "element",
            "L": "left",
            "Q_L": "left",
            "R": "right",
            "Q_R": "right",
        },
        learning_rate=f"{_AROUND_ADAMW}; 3e-3 in arXiv 2409.11321",
        links=("https://arxiv.org/abs/2409.11321", "https://github.com/nikhilvyas/SOAP"),
    ),
    OptimizerInfo(
        name="lion",
        summary="Sign of an interpolated momentum",
        update=(
            "W = (1 - lr wd) W - lr sign(beta1 m + (1 - beta1) G)",
            "m = beta2 m + (1 - beta2) G",
        ),
        kind="elementwise",
        optimizer=Lion,
        hyperparameters=_given(_LION),
        rules=_rules(_LION),
        state={"exp_avg": "element"},
        learning_rate="about 5e-4 (the paper, E)",
        links=("https://arxiv.org/abs/2302.06675",),
    ),
    OptimizerInfo(
        name="nadam",
        summary="AdamW with Nesterov momentum on a schedule, as asynchronous pipelines have used it",
        update=(
            "mu_t = beta1 (1 - 0.96^(t psi) / 2)",
            "m = beta1 m + (1 - beta1) G",
            "v = beta2 v + (1 - beta2) G²",
            "D = mu_{t+1} m / (1 - Π mu up to t+1) + (1 - mu_t) G / (1 - Π mu up to t)",
            "W = (1 - lr wd) W - lr D / (√v̂ + eps)",
        ),
        kind="elementwise",
        optimizer=NAdam,
        rules=NAdam.RULES,
        hyperparameters=_hyperparameters(
            NAdam,
            {
                "betas": "beta1: arXiv 2505.01099; beta2: torch",
                "eps": _EPS,
                "weight_decay": _COMMON_DECAY,
                "momentum_decay": "torch; arXiv 2505.01099's code",
            },
        ),
        state={"exp_avg": "element", "exp_avg_sq": "element"},
        learning_rate=_AROUND_ADAMW,
        links=(
            "https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ",
            "https://arxiv.org/abs/2505.01099",
            "https://docs.pytorch.org/docs/stable/generated/torch.optim.NAdam.html",
        ),
    ),
    OptimizerInfo(
        name="adan",
        summary="Moving averages of the gradient, of its change and of their squared sum",
        update=(
            "D = G - G_last",
            "m = beta1 m + (1 - beta1) G",
            "d = beta2 d + (1 - beta2) D",
            "n = beta3 n + (1 - beta3) (G + beta2 D)²",
            "W = (1 - lr wd) W - lr (m̂ + beta2 d̂) / (√n̂ + eps)",
        ),
        kind="elementwise",
        optimizer=Adan,
        rules=Adan.RULES,
        hyperparameters=_hyperparameters(
            Adan,
            {
                "betas": "https://github.com/sail-sg/Adan; beta1 0.98 in the paper, E",
                "eps": "https://github.com/sail-sg/Adan",
                "weight_decay": _COMMON_DECAY,
                "proximal": "decoupled like every other optimizer here; the authors' code is proximal",
            },
        ),
        state={
            "exp_avg": "element",
            "exp_avg_diff": "element",
            "exp_avg_sq": "element",
            "last_grad": "element",
        },
        learning_rate=f"{_AROUND_ADAMW}; its authors advise 5 to 10 times AdamW's",
        links=("https://arxiv.org/abs/2208.06677", "https://github.com/sail-sg/Adan"),
    ),
    OptimizerInfo(
        name="mars",
        summary="AdamW of a variance-reduced gradient, clipped tensor by tensor; AdamW for 1-D parameters",
        update=(
            "C = G + gamma beta1 / (1 - beta1) (G - G_last)",
            "C = C / max(1, ‖C‖)",
            "m = beta1 m + (1 - beta1) C",
            "v = beta2 v + (1 - beta2) C²",
            "W = (1 - lr wd) W - lr m̂ / (√v̂ + eps)",
        ),
        kind="elementwise",
        whole_tensors=True,
        optimizer=Mars,
        rules=Mars.RULES,
        hyperparameters=_hyperparameters(
            Mars,
            {
                "betas": "arXiv 2411.10438",
                "eps": _EPS,
                "weight_decay": _COMMON_DECAY,
                "gamma": "arXiv 2411.10438",
                "betas_1d": "https://github.com/AGI-Arena/MARS",
            },
        ),
        state={"exp_avg": "element", "exp_avg_sq": "element", "last_grad": "element"},
        learning_rate=f"{_AROUND_ADAMW}; 6e-3, 3e-3, 2e-3 for GPT-2 S, M, L in arXiv 2411.10438",
        links=("https://arxiv.org/abs/2411.10438", "https://github.com/AGI-Arena/MARS"),
    ),
    OptimizerInfo(
        name="mars-m",
        summary="Muon of a variance-reduced gradient",
        update=(
            "C = G + gamma mu / (1 - mu) (G - G_last)",
            "C = C / max(1, ‖C‖)",
            "M = mu M + (1 - mu) C",
            "W = (1 - lr wd) W - lr 0.2 √max(rows, columns) orthogonalize(M)",
        ),
        kind="matrix",
        whole_tensors=True,
        optimizer=MarsM,
        rules=MarsM.RULES,
        hyperparameters=_hyperparameters(MarsM, {**_MUON, "gamma": "arXiv 2510.21800's code"}),
        state={"momentum_buffer": "element", "last_grad": "element"},
        learning_rate=_AROUND_ADAMW,
        links=("https://arxiv.org/abs/2510.21800", "https://github.com/AGI-Arena/MARS"),
    ),
    OptimizerInfo(
        name="signum",
        summary="Sign of the momentum",
        update=("m = mu m + (1 - mu) G", "W = (1 - lr wd) W - lr sign(m)"),
        kind="elementwise",
        optimizer=Signum,
        rules=Signum.RULES,
        hyperparameters=_hyperparameters(
            Signum,
            {
                "momentum": "Muon's; arXiv 1802.04434 uses 0.9",
                "weight_decay": _COMMON_DECAY,
            },
        ),
        state={"exp_avg": "element"},
        learning_rate="as Lion's",
        links=("https://arxiv.org/abs/1802.04434",),
    ),
)


def names() -> list[str]:
    """The names of all optimizers."""
    return [info.name for info in OPTIMIZERS]


def find(name: str) -> OptimizerInfo:
    """The optimizer called ``name``.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    for info in OPTIMIZERS:
        if info.name == name:
            return info
    raise ValueError(f"optimizer {name!r} is unknown; choose one of {', '.join(names())}")
