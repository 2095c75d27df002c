# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""One run at a time saves to a folder."""

import json
import os
import subprocess
import sys

import pytest

from megatron_async.checkpoint import lock
from megatron_async.checkpoint.lock import FolderLock, InUse

HOLD = """
import pathlib, sys, time
from megatron_async.checkpoint.lock import FolderLock
held = FolderLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of the folder until it is killed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def rewrite(folder, **changes):
    path = folder / lock.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_second_run_is_refused_with_the_first_ones_host_and_process(tmp_path, holder):
    named = f"--save {tmp_path} is in use: process {holder.pid} on host {os.uname().nodename} "
    with pytest.raises(InUse, match=named):
        FolderLock(tmp_path)
    holder.kill()
    holder.wait()
    FolderLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_got_the_number_of_a_dead_one_holds_nothing(tmp_path, holder):
    rewrite(tmp_path, started="1")
    FolderLock(tmp_path).release()


def test_a_run_on_another_host_is_known_by_its_touch(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    first = FolderLock(tmp_path / "theirs")
    real = lock._this_process()
    monkeypatch.setattr(lock, "_this_process", lambda: real | {"host": "another"})
    with pytest.raises(InUse, match=f"process {os.getpid()} on host {real['host']}"):
        FolderLock(tmp_path / "theirs", watch=20)
    first._released.set()  # as if it had died
    second = FolderLock(tmp_path / "theirs", watch=0.3)
    assert second._own["host"] == "another"
    with pytest.raises(InUse, match="on host another"):
        first.check()
    second.check()


def test_a_run_that_ended_in_this_process_leaves_no_lock_behind(tmp_path):
    first = FolderLock(tmp_path)
    second = FolderLock(tmp_path)  # the first one failed and never released it
    first.release()
    second.check()
    (tmp_path / lock.NAME).write_text("")
    assert lock._read(tmp_path / lock.NAME) == {}
    with pytest.raises(InUse):
        second.check()
