# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Package metadata; linters, type checker and tests are configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def _version() -> str:
    """The one version string, read without importing the package, whose dependencies may be missing yet."""
    text = (ROOT / "megatron_async" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('megatron_async/__init__.py has no line of the form __version__ = "X.Y.Z"')
    return found.group(1)


setup(
    name="megatron_async",
    version=_version(),
    description="Megatron-Core training with a bubble-free pipeline and one-step-old gradients",
    author="the megatron_async authors",
    keywords="Megatron pipeline-parallel asynchronous PipeDream Muon pretraining",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    packages=find_packages(include=["megatron_async", "megatron_async.*"]),
    package_data={"megatron_async": ["config/contract/*.toml", "planning/devices/*.toml"]},
    python_requires=">=3.12",
    entry_points={"console_scripts": ["megatron-async = megatron_async.cli.main:main"]},
    install_requires=[
        "torch>=2.9",
        # The wheel ships megatron.training too; its private names are met in megatron_async/mcore/.
        "megatron-core[training]>=0.19,<0.20",
        # megatron-core 0.19 drops Muon and SOAP without a word when it meets a newer one.
        "emerging-optimizers>=0.3,<0.4",
        "datasets",
        "tokenizers",
        "transformers",
        "wandb",
        "tensorboard",
        "matplotlib",
        "rich",
        "einops",
        "numpy",
    ],
    extras_require={
        # `megatron-async evaluate`
        "evaluate": ["lm-eval>=0.4.9,<0.5"],
        "dev": ["pytest", "pytest-xdist", "hypothesis", "ruff", "mypy"],
        # Megatron-Core 0.19's own choices. Transformer Engine's torch part is built against the installed torch, so
        # torch comes first and pip needs --no-build-isolation (`make setup GPU=1` does both). Apex is not on the
        # package index; see the Dockerfile. The packages' versions are also in megatron_async/platform/packages.py.
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2.6", "flash-linear-attention>=0.4,<0.5"],
    },
)
