# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The real job script under a real SLURM with two nodes."""

import sys
from collections.abc import Callable
from functools import partial

import pytest

from tests.cluster.run import ROOT, Run, environment
from tests.cluster.slurm import Cluster

NewRun = Callable[[str], Run]


@pytest.fixture
def submit(cluster: Cluster) -> Callable[..., str]:
    """Submits the job script for a run on two nodes, one process each; returns the number of the job."""

    def submit(run: Run, *options: str) -> str:
        variables = environment(
            SLURM_CONF=cluster.environment["SLURM_CONF"], PYTHON=sys.executable, PROCESSES_PER_NODE="1"
        )
        script = ["examples/slurm/pretrain.sbatch", *run.arguments]
        output = ["--parsable", "--nodes=2", "--gpus-per-node=1", f"--output={run.folder}/%j.out", *options]
        run.folder.mkdir(exist_ok=True)
        return cluster.command("sbatch", *output, *script, cwd=ROOT, env=environment(**variables))

    return submit


def logs(*runs: Run) -> str:
    return "\n".join(path.read_text()[-6000:] for run in runs for path in sorted(run.folder.glob("*.out")))


def test_two_jobs_on_the_same_nodes(
    submit: Callable[..., str], cluster: Cluster, new_run: NewRun, undisturbed: Run
) -> None:
    """Both train across the nodes at the same time, with the losses of one host."""
    runs = [new_run("one"), new_run("two")]
    jobs = [submit(run, "--exclusive=user", "--cpus-per-task=1") for run in runs]
    explain = partial(logs, *runs)
    cluster.until(lambda: all(run.batches > 0 for run in runs), "both train", explain)
    assert [cluster.state(job) for job in jobs] == ["RUNNING", "RUNNING"]
    cluster.until(lambda: {cluster.state(job) for job in jobs} == {"COMPLETED"}, "both complete", explain)
    for run in runs:
        run.assert_equal(undisturbed)


def test_a_job_that_is_signalled_and_requeued(
    submit: Callable[..., str], cluster: Cluster, new_run: NewRun, undisturbed: Run
) -> None:
    """It saves and requeues itself, is requeued by the scheduler, and ends as if nothing had happened."""
    run = new_run("run")
    job, explain = submit(run), partial(logs, run)

    def start_again() -> None:
        """The scheduler lets a requeued job wait for two minutes."""
        cluster.until(lambda: cluster.state(job) == "PENDING", "pending again", explain)
        cluster.command("scontrol", "update", f"job={job}", "StartTime=now")
        cluster.until(lambda: cluster.state(job) == "RUNNING", "running again", explain)

    cluster.until(lambda: run.batches > 2, "batches", explain)
    cluster.command("scancel", "--signal=USR1", job)
    cluster.until(lambda: f"requeueing job {job} (restart 1)" in explain(), "saved and requeued", explain)
    start_again()
    done = run.batches
    cluster.until(lambda: run.batches > done, "goes on", explain)
    cluster.command("scontrol", "requeue", job)
    start_again()
    cluster.until(lambda: cluster.state(job) == "COMPLETED", "complete", explain, seconds=300)
    run.assert_equal(undisturbed)


def test_a_job_that_loses_a_node(
    submit: Callable[..., str], cluster: Cluster, new_run: NewRun, undisturbed: Run
) -> None:
    """Everything on a node is killed. The scheduler requeues the job; when the node is back, it goes on from a save."""
    run = new_run("run")
    job, explain = submit(run), partial(logs, run)
    cluster.until(lambda: run.batches > 15, "batches", explain)
    cluster.kill_node("node2")
    cluster.until(lambda: cluster.state(job) != "RUNNING", "taken off the nodes", explain)
    cluster.start_node("node2")
    cluster.until(lambda: cluster.state(job) == "COMPLETED", "complete", explain, seconds=500)
    run.assert_equal(undisturbed)
