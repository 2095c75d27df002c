# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A SLURM cluster of two nodes, one network namespace each: the real munged, slurmctld and slurmd."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.cluster import hosts
from tests.cluster.hosts import Hosts
from tests.cluster.run import ROOT, Run, environment

SCRIPT = "examples/slurm/pretrain.sbatch"
_PARTS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
CONFIGURATION = """
ClusterName=test
SlurmctldHost=head({head})
SlurmctldPort=27817
SlurmdPort=27818
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=2
ReturnToService=2
KillWait=5
SlurmdTimeout=10
MinJobAge=600
JobRequeue=1
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
PlugStackConfig={folder}/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeAddr={address} CPUs=4 RealMemory=1000 Gres=gpu:2 State=UNKNOWN"


def missing() -> str:
    """Why there can be no cluster; empty if there can."""
    absent = [part for part in _PARTS if shutil.which(part) is None and not Path("/usr/sbin", part).exists()]
    return hosts.missing() or (f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)" if absent else "")


class Cluster:
    """A running cluster. `folder` holds its state and logs; daemons are ended by their process ids."""

    def __init__(self, folder: Path, machines: Hosts) -> None:
        self.folder, self.machines = folder, machines
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        nodes = [_NODE.format(name=name, address=address) for name, address in machines.addresses.items()]
        text = CONFIGURATION.format(head=machines.head, folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n", encoding="utf-8")
        (folder / "none").touch()
        for part in ("state", *(f"spool-{name}" for name in machines.names)):
            (folder / part).mkdir()
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        try:
            self._start_all()
        except BaseException:
            self._stop_all()
            raise
        return self

    def _start_all(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {f"{kind}-file": self.folder / f"munge.{kind}" for kind in ("key", "pid", "seed", "log")}
        options = [f"--{name}={path}" for name, path in files.items()] + [f"--socket={self.folder / 'munge.socket'}"]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        self.until(lambda: (self.folder / "munge.socket").exists(), "munged")
        self.start_controller()
        for name in self.machines.names:
            self.start_node(name)
        nodes = str(len(self.machines.names))
        self.until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == nodes, "idle nodes")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.command("scancel", "--user=root")
            self.until(lambda: self.command("squeue", "-h") == "", "an empty queue")
        finally:
            self._stop_all()

    def _stop_all(self) -> None:
        for process in reversed(self._daemons.values()):
            process.terminate()
            process.wait(30)

    def _start(self, name: str, command: list[str]) -> None:
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        with (self.folder / f"{name}.out").open("a") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment | {"PATH": path}, stdout=log, stderr=log, text=True
            )

    def start_controller(self) -> None:
        """Start slurmctld."""
        self._start("slurmctld", ["unshare", "--uts", "sh", "-c", "hostname head; exec slurmctld -D"])

    def kill_controller(self) -> None:
        """Kill slurmctld."""
        daemon = self._daemons.pop("slurmctld")
        daemon.kill()
        daemon.wait()

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._start(name, self.machines.on(name, "slurmd", "-D", "-N", name))

    def kill_node(self, name: str) -> None:
        """Kill a node: its daemon and everything that runs on it."""
        daemon = self._daemons.pop(name)
        for pid in [daemon.pid, *self.machines.processes(name)]:
            subprocess.run(["kill", "-9", str(pid)], capture_output=True)
        daemon.wait()

    def command(self, *words: str, **options: Any) -> str:
        """Output of a SLURM command; `options` as for `subprocess.run`."""
        done = self.ask(*words, **options)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def ask(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a SLURM command, whether it works or not."""
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60} | options
        return subprocess.run(words, **options)

    def submit(self, run: Run, *options: str, **variables: str) -> str:
        """Submit the job script for a run on all nodes, one process each; returns the number of the job."""
        more = {"SLURM_CONF": self.environment["SLURM_CONF"], "PYTHON": sys.executable, "PROCESSES_PER_NODE": "1"}
        nodes = f"--nodes={len(self.machines.names)}"
        run.folder.mkdir(exist_ok=True)
        words = ["--parsable", nodes, "--gpus-per-node=1", f"--output={run.folder}/%j.out", *options, SCRIPT]
        return self.command("sbatch", *words, *run.arguments, cwd=ROOT, env=environment(**more | variables))

    def state(self, job: str) -> str:
        """State of a job, for example RUNNING."""
        return self.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def until(
        self, condition: Callable[[], bool], what: str, explain: Callable[[], str] = str, seconds: float = 120
    ) -> None:
        """Wait for a condition; fails with the logs of the daemons and the text of `explain`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.folder.glob("*.out"))
                raise AssertionError(f"{what}: not within {seconds:g} s\n{logs}\n{explain()}")
            time.sleep(0.2)
