# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The only importer of `megatron.training` and of private Megatron names, and the check of Megatron's version."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# Package, tested range, and the requirement to install. A newer emerging-optimizers makes Megatron-Core 0.19 drop Muon
# and SOAP without a message.
TESTED = (
    ("megatron-core", ">=0.19,<0.20", "megatron-core[training]>=0.19,<0.20"),
    ("emerging-optimizers", ">=0.3,<0.4", "emerging-optimizers>=0.3,<0.4"),
)


class UnsupportedVersion(ImportError):
    """An installed package is outside the tested range."""


def installed_versions() -> Iterator[tuple[str, str | None, bool, str, str]]:
    """Each package: name, installed version or None, whether that is tested, the tested range, the requirement."""
    for package, tested, requirement in TESTED:
        try:
            installed = version(package)
        except PackageNotFoundError:
            installed = None
        fits = installed is not None and SpecifierSet(tested).contains(installed, prereleases=True)
        yield package, installed, fits, tested, requirement


def check_versions() -> None:
    """Check the installed versions of Megatron-Core and emerging-optimizers. Imports neither.

    Raises:
        UnsupportedVersion: names each package outside its tested range and the command that installs it.
    """
    problems = [
        f"{package} {installed or 'is not installed'}: this version of megatron_async is tested with {tested}. "
        f"Run: pip install '{requirement}'"
        for package, installed, fits, tested, requirement in installed_versions()
        if not fits
    ]
    if problems:
        raise UnsupportedVersion("\n".join(problems))
