# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The image for CPUs: built by buildah on a base from debootstrap, run without rights on a root that is read-only.

No image registry is needed. Torch makes the image 6 GB large, and the first build takes ten minutes. Base and image
stay in runs/images, where the next build finds its layers.
"""

import json
import os
import shutil
import subprocess
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
