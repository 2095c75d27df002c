# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""torchrun across two hosts."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from megatron_async.files import read_json_lines
from tests.cluster.hosts import Hosts
from tests.cluster.run import ROOT, Run, environment

NewRun = Callable[[str], Run]
Until = Callable[..., None]
STATIC = "--nnodes 2 --node-rank {number} --master-addr node1 --master-port {port}"
ELASTIC = "--nnodes 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node1:{port} --rdzv-id {port}"

NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Launchers:
    """Launchers on hosts, with logs; ended with their workers at the end."""

    def __init__(self, machines: Hosts, folder: Path) -> None:
        self._machines, self._folder, self._stack = machines, folder, ExitStack()
        self._started: list[subprocess.Popen[str]] = []

    def __call__(self, name: str, options: str, run: Run, *more: str, **variables: str) -> subprocess.Popen[str]:
        """Start the launcher of a host with one process."""
        options = options.format(number=self._machines.names.index(name))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *options.split()]
        command += ["-m", "megatron_async.pretrain", *run.arguments, *more]
        log = self._stack.enter_context((self._folder / f"{name}.log").open("a"))
        process = self._machines.start(
            name, *command, cwd=ROOT, env=environment(**variables), stdout=log, stderr=subprocess.STDOUT
        )
        self._started.append(process)
        return process

    def log(self, name: str = "*") -> str:
        logs = sorted(self._folder.glob(f"{name}.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-8000:]}" for log in logs)

    def end(self) -> None:
        for process in self._started:
            process.kill()  # its workers end with it
            process.wait()
        self._stack.close()


@pytest.fixture
def launch(machines: Hosts, tmp_path: Path) -> Iterator[Launchers]:
    launchers = Launchers(machines, tmp_path)
    yield launchers
    launchers.end()


def test_two_hosts_train_as_one_does(launch: Launchers, new_run: NewRun, undisturbed: Run) -> None:
    run, options = new_run("run"), STATIC.replace("{port}", "29501")
    processes = [launch(name, options, run) for name in ("node1", "node2")]
    assert [process.wait(240) for process in processes] == [0, 0], launch.log()
    run.assert_equal(undisturbed)


def test_the_loss_of_a_host(
    launch: Launchers, machines: Hosts, new_run: NewRun, undisturbed: Run, until: Until
) -> None:
    """Everything on one host is killed; it comes back, and the run goes on from the newest checkpoint.

    With the shared store, torch 2.13's launchers give the address of the store to new hosts in the first round alone.
    """
    run, options = new_run("run"), ELASTIC.replace("{port}", "29502")
    first = launch("node1", options, run, **NO_SHARED_STORE)
    launch("node2", options, run, **NO_SHARED_STORE)
    until(lambda: run.batches > 15, "15 batches", launch.log)
    for pid in machines.processes("node2"):
        subprocess.run(["kill", "-9", str(pid)], check=False)
    again = launch("node2", options, run, **NO_SHARED_STORE)
    assert [first.wait(300), again.wait(60)] == [0, 0], launch.log()
    run.assert_equal(undisturbed)


def test_hosts_that_differ_are_refused(launch: Launchers, new_run: NewRun, tmp_path: Path) -> None:
    """Another learning rate and another line of code on one host."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "megatron_async", copy / "megatron_async", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "megatron_async" / "files.py").open("a") as file:
        file.write("# changed\n")
    run, options = new_run("run"), STATIC.replace("{port}", "29503")
    first = launch("node1", options, run)
    second = launch("node2", options, run, "--lr", "0.02", PYTHONPATH=str(copy), PYTHONSAFEPATH="1")
    assert first.wait(120) != 0 and second.wait(120) != 0
    text = launch.log("node1")
    assert "2 problems with the hosts of the job; nothing was started" in text, text
    assert "code of megatron_async is" in text
    assert "--lr is 0.02 on node2: rank 1, but 0.01 on node1: rank 0" in text
    assert not run.saves.exists()


STAND_IN = """
import torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
"""


def test_a_host_without_a_gpu_among_hosts_with_them(launch: Launchers, new_run: NewRun, tmp_path: Path) -> None:
    """A stand-in: torch on the first host says that it has a GPU. The job is refused before it is used."""
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in" / "sitecustomize.py").write_text(STAND_IN, encoding="utf-8")
    run, options = new_run("run"), STATIC.replace("{port}", "29506")
    more = ("--device", "auto", "--distributed-timeout-minutes", "2")
    first = launch("node1", options, run, *more, PYTHONPATH=f"{tmp_path / 'stand-in'}:{ROOT}")
    second = launch("node2", options, run, *more)
    assert first.wait(120) != 0 and second.wait(120) != 0
    text = launch.log("node1")
    assert "1 of 2 ranks see no usable GPU (node2: rank 1), the others do" in text, text
    assert not run.saves.exists()


def test_a_second_run_on_the_folder_of_a_run_on_another_host(
    launch: Launchers, machines: Hosts, new_run: NewRun, until: Until
) -> None:
    run = new_run("run")
    one = "--nnodes 1 --master-addr node1 --master-port 29504 --nproc-per-node 2"
    first = launch("node1", one, run, "--train-iters", "3000")
    until(lambda: run.batches > 0, "a batch", launch.log)
    (holder,) = [pid for pid in machines.processes("node1") if f'"pid": {pid},' in (run.saves / ".lock").read_text()]
    second = launch("node2", one.replace("node1", "node2"), run, "--train-iters", "3000")
    assert second.wait(120) != 0
    assert f"is in use: process {holder} on host node1 saves to it since" in launch.log("node2")
    assert first.poll() is None, launch.log("node1")


def test_a_port_that_is_taken(launch: Launchers, machines: Hosts, new_run: NewRun) -> None:
    listen = "import socket, sys; s = socket.create_server(('', 29505)); print(0, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with machines.start("node1", sys.executable, "-c", listen, **pipes) as listener:
        assert listener.stdout is not None and listener.stdout.readline() == "0\n"
        process = launch("node1", "--nnodes 1 --master-addr node1 --master-port 29505", new_run("run"))
        assert process.wait(120) != 0
        assert "29505" in launch.log() and "EADDRINUSE" in launch.log(), launch.log()
        listener.kill()


def test_the_containers_of_docker_compose(tmp_path: Path) -> None:
    """Their commands on two hosts of those names. Docker itself is not here: images are in test_image.py."""
    content = yaml.safe_load((ROOT / "docker" / "docker-compose.yml").read_text(encoding="utf-8"))
    services = content["services"]
    with Hosts(tmp_path, tuple(services)) as machines:
        processes = []
        for name, service in services.items():
            assert service["hostname"] == name and service["image"] == "megatron-async:cpu" and service["read_only"]
            torchrun, *words = service["command"].split()
            assert torchrun == "torchrun" and service["volumes"] == ["../runs:/work/runs"]
            command = [sys.executable, "-m", "torch.distributed.run", *words]
            log = (tmp_path / f"{name}.log").open("w")
            options = {"cwd": tmp_path, "env": environment(**service["environment"]), "stdout": log, "stderr": log}
            processes.append(machines.start(name, *command, **options))
        assert [process.wait(300) for process in processes] == [0, 0], (tmp_path / "host0.log").read_text()[-4000:]
    rows = read_json_lines(tmp_path / "runs" / "compose" / "metrics.jsonl")
    assert [row["iteration"] for row in rows if "lm_loss" in row] == list(range(1, 21))
