# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The real job script under a real SLURM with two nodes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.cluster.faults import is_rank
from tests.cluster.run import ROOT, Run, environment
from tests.cluster.slurm import Cluster

NewRun = Callable[[str], Run]


def logs(*runs: Run) -> str:
    return "\n".join(path.read_text()[-6000:] for run in runs for path in sorted(run.folder.glob("*.out")))


def test_two_jobs_on_the_same_nodes(cluster: Cluster, new_run: NewRun, undisturbed: Run) -> None:
    """Both train across the nodes at the same time, with the losses of one host."""
    runs = [new_run("one"), new_run("two")]
    jobs = [cluster.submit(run, "--exclusive=user", "--cpus-per-task=1") for run in runs]
    explain = partial(logs, *runs)
    cluster.until(lambda: all(run.batches > 0 for run in runs), "both train", explain)
    assert [cluster.state(job) for job in jobs] == ["RUNNING", "RUNNING"]
    cluster.until(lambda: {cluster.state(job) for job in jobs} == {"COMPLETED"}, "both complete", explain)
    for run in runs:
        run.assert_equal(undisturbed)


def test_a_job_that_is_signalled_and_requeued(cluster: Cluster, new_run: NewRun, undisturbed: Run) -> None:
    """It saves and requeues itself, is requeued by the scheduler, and ends as if nothing had happened."""
    run = new_run("run")
    job, explain = cluster.submit(run), partial(logs, run)
    cluster.until(lambda: run.batches > 2, "batches", explain)
    cluster.command("scancel", "--signal=USR1", job)
    cluster.until(lambda: f"requeueing job {job} (restart 1)" in explain(), "saved and requeued", explain)
    done = run.batches
    cluster.until(lambda: run.batches > done, "goes on", explain, seconds=240)
    cluster.command("scontrol", "requeue", job)
    cluster.until(lambda: cluster.state(job) == "COMPLETED", "complete", explain, seconds=300)
    run.assert_equal(undisturbed)


def test_a_job_that_reaches_its_time_limit(cluster: Cluster, new_run: NewRun, undisturbed: Run) -> None:
    """The scheduler signals it ten minutes before the limit; it saves and goes on in another allocation.

    The ranks are stopped until then, since the run is shorter than the scheduler's rounds; the scheduler lets processes
    that it signals go on.
    """
    run = new_run("run")
    job, explain = cluster.submit(run, "--time=60"), partial(logs, run)
    cluster.until(lambda: run.batches > 2, "batches", explain)
    ranks = [pid for name in cluster.machines.names for pid in cluster.machines.processes(name) if is_rank(pid)]
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    cluster.command("scontrol", "update", f"job={job}", "TimeLimit=9")
    cluster.until(lambda: f"saved on request; requeueing job {job} (restart 1)" in explain(), "requeued", explain)
    cluster.command("scontrol", "update", f"job={job}", "TimeLimit=60")  # for the next allocation
    cluster.until(lambda: cluster.state(job) == "COMPLETED", "complete", explain, seconds=300)
    run.assert_equal(undisturbed)


def test_a_job_that_loses_a_node(cluster: Cluster, new_run: NewRun, undisturbed: Run) -> None:
    """Everything on a node is killed. The scheduler requeues the job; when the node is back, it goes on from a save."""
    run = new_run("run")
    job, explain = cluster.submit(run), partial(logs, run)
    cluster.until(lambda: run.batches > 15, "batches", explain)
    cluster.kill_node("node2")
    cluster.until(lambda: cluster.state(job) != "RUNNING", "taken off the nodes", explain)
    cluster.start_node("node2")
    cluster.until(lambda: cluster.state(job) == "COMPLETED", "complete", explain, seconds=500)
    run.assert_equal(undisturbed)


def test_a_job_that_fails_is_tried_again(cluster: Cluster, new_run: NewRun, undisturbed: Run) -> None:
    """A rank is killed. With RETRIES the job requeues itself."""
    run = new_run("run")
    job, explain = cluster.submit(run, RETRIES="1"), partial(logs, run)
    cluster.until(lambda: run.batches > 15, "batches", explain)
    os.kill(next(pid for pid in cluster.machines.processes("node2") if is_rank(pid)), signal.SIGKILL)
    cluster.until(lambda: f"requeueing job {job} (restart 1)" in explain(), "requeued", explain)
    cluster.until(lambda: cluster.state(job) == "COMPLETED", "complete", explain, seconds=300)
    run.assert_equal(undisturbed)


RECIPE = """
[cluster]
nodes = 2
gpus = 1
[arguments]
device = "cpu"
num-layers = 2
hidden-size = 32
num-attention-heads = 4
seq-length = 16
max-position-embeddings = 16
micro-batch-size = 1
global-batch-size = 4
train-iters = 6
optimizer = "muon"
lr = 1e-2
vocab-size = 61
split = "50,50,0"
tokenizer-type = "NullTokenizer"
eval-interval = 6
eval-iters = 1
num-workers = 0
save-interval = 3
[pipeline]
pipeline-model-parallel-size = 2
"""


def test_the_array_of_a_table_of_the_paper(cluster: Cluster, prefix: str, tmp_path: Path) -> None:
    """The jobs of one row at a tiny size: submitted as the command says, then collected into the table."""
    recipe, output = tmp_path / "tiny.toml", tmp_path / "output"
    recipe.write_text(RECIPE, encoding="utf-8")
    words = ["table1", "--scale", str(recipe), "--rows", "muon", "--seeds", "1", "--output", str(output)]
    variables = environment(DATA=prefix, TOKENIZER="none", PYTHON=sys.executable, PROCESSES_PER_NODE="1")
    variables |= {"SLURM_CONF": cluster.environment["SLURM_CONF"]}

    def table() -> str:
        command = [sys.executable, "examples/paper/run.py", *words]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"2 jobs in {output / 'jobs.txt'}" in table()
    logs = f"--output={tmp_path}/%A-%a.out"
    job = cluster.command("sbatch", "--parsable", logs, str(output / "array.sbatch"), cwd=ROOT, env=variables)

    def explain() -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(tmp_path.glob("*.out")))

    def states() -> list[str]:
        return cluster.command("squeue", "-h", "-t", "all", "-r", "-j", job, "-o", "%T").split()

    cluster.until(lambda: set(states()) == {"COMPLETED"}, "both tasks", explain, seconds=300)
    assert len(states()) == 2
    assert "Every run is done" in table()
    assert (output / "table1.md").exists()
