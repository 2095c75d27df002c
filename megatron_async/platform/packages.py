# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optional packages of a GPU machine: which versions fit, and what is off without each of them."""

import importlib.util
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, slots=True)
class OptionalPackage:
    """A package that a run on GPUs can do without.

    Attributes:
        name: of the distribution.
        modules: all of them must be there.
        fits: versions that fit; "" for all. No version was run with this package, which is tested on CPUs.
        off: what is off without it.
        install: how to get it.
    """

    name: str
    modules: tuple[str, ...]
    fits: str
    off: str
    install: str

    @property
    def version(self) -> str | None:
        """The installed version, "unknown" where the package does not state one; None where it is not installed."""
        if any(importlib.util.find_spec(module) is None for module in self.modules):
            return None
        try:
            return version(self.name)
        except PackageNotFoundError:
            return "unknown"

    @property
    def usable(self) -> bool:
        """Whether a version that fits is installed. One that does not state its version counts as fitting."""
        found = self.version
        return found is not None and (found == "unknown" or SpecifierSet(self.fits).contains(found, prereleases=True))

    @property
    def lack(self) -> str:
        """One sentence on why it cannot be used: it is missing, or its version does not fit."""
        found = self.version
        return f"{self.name} {found}, but {self.fits} is needed" if found else f"{self.name} is not installed"


TRANSFORMER_ENGINE = OptionalPackage(
    "transformer-engine",
    ("transformer_engine", "transformer_engine_torch"),
    ">=2.6",  # since then a fused weight gradient takes main_grad at backward
    "--transformer-impl transformer_engine (the default); fused norms, attention, rotary embeddings and Adam; grouped "
    "products of experts",
    "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]>=2.6' (core_cu12 where torch is built "
    "for CUDA 12)",
)
APEX = OptionalPackage(
    "apex",
    ("fused_weight_gradient_mlp_cuda",),
    "",
    "fused accumulation of weight gradients in the LM head and, with --transformer-impl local, in all layers; the "
    "fused softmax and the persistent layer norm of --transformer-impl local",
    "not on the package index: build it from github.com/NVIDIA/apex with its C++ and CUDA extensions, or use the "
    "image of the Dockerfile",
)
FLASH_LINEAR_ATTENTION = OptionalPackage(
    "flash-linear-attention",
    ("fla",),
    ">=0.4,<0.5",  # as megatron-core 0.19 requires it
    "--experimental-attention-variant gated_delta_net, unless --deterministic-mode computes it in torch",
    "pip install 'flash-linear-attention>=0.4,<0.5'",
)
MAMBA_SSM = OptionalPackage(
    "mamba-ssm",
    ("mamba_ssm", "causal_conv1d"),
    ">=2.2,<2.4",  # as megatron-core 0.19 requires it
    "Mamba layers (M) of --hybrid-layer-pattern, unless --deterministic-mode computes them in torch",
    "pip install --no-build-isolation 'mamba-ssm>=2.2,<2.4' 'causal-conv1d>=1.5,<1.7'",
)
OPTIONAL = (TRANSFORMER_ENGINE, APEX, FLASH_LINEAR_ATTENTION, MAMBA_SSM)


def messages() -> list[str]:
    """For the start of a run on GPUs: one line for each package that is missing or does not fit."""
    return [f"{package.lack}; off: {package.off}" for package in OPTIONAL if not package.usable]
