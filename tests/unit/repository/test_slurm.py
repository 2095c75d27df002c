# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The SLURM scripts, with faked scheduler commands and real workers."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.slurm import launch
from tests.unit.repository.commands import write_command

ROOT = Path(__file__).resolve().parents[3]
SBATCH = ROOT / "examples" / "slurm" / "pretrain.sbatch"


def allocation(tmp_path: Path) -> dict[str, str]:
    """Variables of an allocation whose scheduler commands are fakes that log their calls to `tmp_path/calls`."""
    calls = tmp_path / "calls"
    write_command(
        tmp_path / "bin",
        "scontrol",
        f'echo "scontrol $*" >>"{calls}"\n'
        '[ "$1" = show ] || exit 0\n'
        'case $3 in "node[01-02]") printf "node01\\nnode02\\n" ;; node01) echo node01 ;; *) exit 1 ;; esac',
    )
    write_command(tmp_path / "bin", "srun", f'echo "srun $*" >>"{calls}"\nexit "${{SRUN_STATUS:-0}}"')
    return {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node01",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


def slurm(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the job script in a faked allocation."""
    return subprocess.run(
        ["/bin/bash", SBATCH, *arguments],
        env=allocation(tmp_path) | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )


def dry_run(tmp_path: Path, **variables: str) -> dict[str, str]:
    done = slurm(tmp_path, "--lr", "1e-3", "--save", "a folder", DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def test_slurm_script_is_valid_bash() -> None:
    subprocess.run(["/bin/bash", "-n", SBATCH], check=True)


def test_slurm_dry_run_of_two_nodes(tmp_path: Path) -> None:
    shown = dry_run(tmp_path, SLURM_JOB_NODELIST="node[01-02]", SLURM_NNODES="2")
    assert shown["address"] == "node01"
    assert shown["nodes"] == "2"
    assert shown["world size"] == "16"
    assert f"--master-addr node01 --master-port {shown['port']}" in shown["command"]
    assert "--nnodes 2 --nproc-per-node 8" in shown["command"]
    assert shown["command"].endswith(
        "-m megatron_async.pretrain --exit-signal-handler --exit-signal SIGUSR1 --lr 1e-3 --save a\\ folder"
    )
    assert not any(call.startswith("srun") for call in calls(tmp_path))


def test_slurm_takes_the_arguments_of_a_recipe(tmp_path: Path) -> None:
    variables = {"LAUNCH": f"/bin/bash {SBATCH}", "DRY_RUN": "1", "TOKENIZER": "t", "DATA": "d", "SAVE": "a folder"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "pretrain.py", "moe-10b-hybrid", "--lr", "1e-3"],
        env=allocation(tmp_path) | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout.splitlines()[-1])
    ours = command.index("megatron_async.pretrain") + 1
    assert command[ours : ours + 5] == [*"--exit-signal-handler --exit-signal SIGUSR1 --model moe-10b-hybrid".split()]
    assert "--save a folder --load a folder --metrics-file a folder/metrics.jsonl" in " ".join(command)
    assert command[command.index("--pipeline-model-parallel-layout") + 1] == "Et*6|t*7|t*7|t*4L"
    assert command[-2:] == ["--lr", "1e-3"]


def test_slurm_dry_run_of_one_node_with_processes_set(tmp_path: Path) -> None:
    shown = dry_run(tmp_path, PROCESSES_PER_NODE="3")
    assert (shown["address"], shown["world size"]) == ("node01", "3")


def test_slurm_ports_differ_between_jobs_and_avoid_ephemeral_ones(tmp_path: Path) -> None:
    ports = [int(dry_run(tmp_path, SLURM_JOB_ID=job)["port"]) for job in ("1", "2", "11999", "98765432")]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 32000 for port in ports)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"SLURM_JOB_NODELIST": "nonsense"}, "could not expand nonsense"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_NNODES": "2"}, "names 1 hosts for node01, but SLURM_NNODES is 2"),
        ({"SLURM_GPUS_ON_NODE": ""}, "PROCESSES_PER_NODE"),
        ({"PROCESSES_PER_NODE": "0"}, "'0'"),
        ({"SLURM_SUBMIT_DIR": "/"}, "submit from the repository's root"),
    ],
)
def test_slurm_script_refuses_what_it_cannot_resolve(tmp_path: Path, variables: dict[str, str], complaint: str) -> None:
    done = slurm(tmp_path, "--lr", "1e-3", **variables)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "localhost" not in done.stdout + done.stderr
    assert not any(call.startswith("srun") for call in calls(tmp_path))


def test_slurm_enters_a_container_on_request(tmp_path: Path) -> None:
    """The line for pyxis; srun without it knows no such options. Without an image the line has none of them."""
    image = {"CONTAINER_IMAGE": "registry#a/image:1", "CONTAINER_MOUNTS": "/data:/data"}
    words = shlex.split(dry_run(tmp_path, **image)["command"])
    assert words[: words.index(str(SBATCH.parent / "launch.py"))] == [
        *"srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --wait=60 --label".split(),
        "--container-image=registry#a/image:1",
        f"--container-mounts={ROOT}:{ROOT},/data:/data",
        f"--container-workdir={ROOT}",
        "python",
    ]
    assert f" {ROOT}:{ROOT} " not in dry_run(tmp_path, CONTAINER_IMAGE="a")["command"]
    assert "/a/python" in dry_run(tmp_path, CONTAINER_IMAGE="a", PYTHON="/a/python")["command"]
    command = dry_run(tmp_path)["command"]
    assert "container" not in command and f"{ROOT}/.venv/bin/python" in command


def test_slurm_srun_gets_the_container(tmp_path: Path) -> None:
    assert slurm(tmp_path, "--lr", "1e-3", CONTAINER_IMAGE="/images/a b.sqsh").returncode == 0
    (call,) = [call for call in calls(tmp_path) if call.startswith("srun")]
    assert "--container-image=/images/a b.sqsh" in call


def test_slurm_script_without_the_host_tool_fails_at_once(tmp_path: Path) -> None:
    write_command(tmp_path / "tools", "srun", f"echo called >{tmp_path / 'calls'}")
    done = slurm(tmp_path, "--lr", "1e-3", PATH=str(tmp_path / "tools"))
    assert done.returncode == 2
    assert "scontrol is not on PATH" in done.stderr
    assert calls(tmp_path) == []


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, False), (137, False), (85, True), (138, True)])
def test_slurm_requeues_on_the_documented_status_only(tmp_path: Path, status: int, requeued: bool) -> None:
    done = slurm(tmp_path, "--save", "c", "--load=c", SRUN_STATUS=str(status))
    assert done.returncode == (0 if requeued else status), done.stderr
    assert ("scontrol requeue 1234567" in calls(tmp_path)) is requeued


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(1, "1", True), (137, "0", True), (1, "2", False), (2, "0", False), (0, "0", False)],
)
def test_slurm_requeues_a_run_that_failed_on_request(
    tmp_path: Path, status: int, restarts: str, requeued: bool
) -> None:
    """Not one that another start would refuse too, and not for ever."""
    variables = {"RETRIES": "2", "SLURM_RESTART_COUNT": restarts}
    done = slurm(tmp_path, "--save", "c", "--load", "c", SRUN_STATUS=str(status), **variables)
    assert done.returncode == (0 if requeued else status), done.stderr
    assert ("scontrol requeue 1234567" in calls(tmp_path)) is requeued


@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        (("--load", "c"), {}, "--save is not among"),
        (("--save", "c"), {}, "--load is not among"),
        (("--save", "c", "--load", "b", "--finetune"), {}, "--pretrained-checkpoint instead"),
        (("--save", "c", "--load", "c"), {"SLURM_RESTART_COUNT": "50"}, "restarted 50 times"),
    ],
)
def test_slurm_does_not_requeue_a_run_that_would_not_get_on(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], complaint: str
) -> None:
    done = slurm(tmp_path, *arguments, SRUN_STATUS="85", **variables)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "scontrol requeue 1234567" not in calls(tmp_path)


def test_slurm_readme_names_the_requeue_status_and_settings() -> None:
    script = SBATCH.read_text(encoding="utf-8")
    readme = (SBATCH.parent / "README.md").read_text(encoding="utf-8")
    settings = re.findall(r"\$\{(REQUEUE_STATUS|MAX_RESTARTS|RETRIES):-(\d+)\}", script)
    assert len(settings) == 3
    for name, default in settings:
        assert f"| `{name}` | {default} |" in readme


WORKER = """
import os, pathlib, signal, sys, time
def leave(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text("saved")
    while len(list(pathlib.Path(sys.argv[1]).glob("[01]"))) < 2:
        time.sleep(0.05)
    sys.exit(85)
signal.signal(signal.SIGUSR1, leave)
pathlib.Path(sys.argv[1], "ready" + os.environ["RANK"]).touch()
time.sleep(60)
"""


def launcher(*arguments: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(ROOT / "examples" / "slurm" / "launch.py")
    return [sys.executable, script, "--nproc-per-node", "2", "--master-port", str(port), *arguments]


@pytest.mark.parametrize(
    ("failures", "status"),
    [
        ([(5, 85)], 85),
        ([(5, -15), (5, 85)], 85),
        ([(4, -9), (5, 85)], 137),
        ([(6, 1), (5, 85), (6, -15)], 85),
        ([(5, -15)], 143),
    ],
)
def test_launcher_reports_the_worker_that_ended_first(failures: list[tuple[int, int]], status: int) -> None:
    assert launch._status(failures) == status


@pytest.mark.distributed
def test_launcher_passes_the_signal_on_and_keeps_the_workers_status(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER, encoding="utf-8")
    process = subprocess.Popen(
        launcher("--master-addr", "127.0.0.1", str(worker), str(tmp_path)),
        env=os.environ | {"OMP_NUM_THREADS": "1", "SLURM_NODEID": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline, "the workers did not start"
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 85, errors
    assert sorted(path.name for path in tmp_path.glob("[01]")) == ["0", "1"]


@pytest.mark.distributed
def test_launcher_refuses_an_address_that_does_not_resolve() -> None:
    started = time.monotonic()
    done = subprocess.run(
        launcher("--master-addr", "no-such-host.invalid", "-m", "this"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "no-such-host.invalid does not resolve" in done.stderr
    assert time.monotonic() - started < 30


@pytest.mark.distributed
def test_launcher_names_the_nodes_that_do_not_start() -> None:
    """Two of four nodes; both say why they end, and no worker was started."""
    meeting = ["--nnodes", "4", "--rdzv-conf", "timeout=6", "--master-addr", "127.0.0.1", "-m", "this"]
    command = launcher(*meeting)
    variables = os.environ | {"HOSTS": "node01 node02 node03 node04"}
    processes = [
        subprocess.Popen(command, env=variables | {"SLURM_NODEID": node}, stderr=subprocess.PIPE, text=True)
        for node in ("0", "2")
    ]
    first, other = (process.communicate(timeout=60)[1] for process in processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert "2 of 4 nodes did not start within 6 s: node02 (node 1), node04 (node 3)" in first
    assert "the first node" in other


@pytest.mark.distributed
def test_launcher_names_a_port_that_is_taken() -> None:
    command = launcher("--nnodes", "2", "--master-addr", "127.0.0.1", "-m", "this")
    with socket.create_server(("", int(command[command.index("--master-port") + 1]))):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "another process may hold it" in done.stderr
