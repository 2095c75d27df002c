# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hosts, a cluster, and one small run that nobody disturbed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts, slurm
from tests.cluster.run import ROOT, Run, environment, write_documents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Hosts]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Hosts(tmp_path_factory.mktemp("hosts")) as machines:
        yield machines


@pytest.fixture(scope="session")
def cluster(machines: hosts.Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm.Cluster(tmp_path_factory.mktemp("slurm"), machines) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(str(tmp_path_factory.mktemp("data") / "documents"))


@pytest.fixture
def new_run(prefix: str, tmp_path: Path) -> Callable[[str], Run]:
    """Makes runs with folders of their own."""
    return lambda name: Run(tmp_path / name, prefix)


@pytest.fixture(scope="session")
def undisturbed(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run on two processes of one host, without a disturbance."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), prefix)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "megatron_async.pretrain", *run.arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return run


@pytest.fixture
def until() -> Callable[..., None]:
    """Waits for a condition; fails with `what`, and the text that `explain` gives, after some minutes."""

    def wait(condition: Callable[[], bool], what: str, explain: Callable[[], str] = str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{explain()}"
            time.sleep(0.05)

    return wait
