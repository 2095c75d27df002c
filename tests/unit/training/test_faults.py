# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Skipped updates, loss spikes, requests to end, silent neighbors."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_async.mcore.batch_sizes import BatchSizes
from megatron_async.pipeline.links import LinkFailure, _wait
from megatron_async.pipeline.update import UpdateReport
from megatron_async.training.callbacks import CompletedBatch
from megatron_async.training.faults import LossSpikes, SkippedUpdates, TrainingFault
from megatron_async.training.loop import Loop
from megatron_async.training.signals import StopRequests

ROOT = Path(__file__).resolve().parents[3]


SIZES = BatchSizes(((0, 8),))


def test_samples_of_a_batch():
    assert SIZES.samples(0) == "0 to 7"
    assert SIZES.samples(3) == "24 to 31"
    assert SIZES.samples(2, last=4) == "16 to 39"


class Notes:
    """The part of a loop that notes are told to."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def completed(batch: int, *, skipped: bool) -> CompletedBatch:
    return CompletedBatch(batch, [UpdateReport(0, batch, 1.0, skipped, ())], 0.1, 0.5, None)


def test_an_update_that_is_made_ends_the_row():
    skips, notes = SkippedUpdates(3, SIZES), Notes()
    skips.on_train_begin(notes)
    for batch in (0, 1):
        skips.on_batch_end(completed(batch, skipped=True))
    skips.on_batch_end(completed(2, skipped=False))
    for batch in (3, 4):
        assert not skips.wants_stop
        skips.on_batch_end(completed(batch, skipped=True))
    skips.on_batch_end(completed(5, skipped=True))
    assert "samples 40 to 47" in notes.texts[-1]
    assert skips.wants_stop
    # Batches that had begun go on to their end; the verdict stays.
    skips.on_batch_end(completed(6, skipped=False))
    assert skips.wants_stop
    assert "iterations 4 to 6, samples 24 to 47" in skips.verdict(None)


def test_a_stage_without_skips_says_who_had_them():
    assert "another stage" in SkippedUpdates(3, SIZES).verdict(100)


def test_loss_spikes():
    spikes = LossSpikes(window=10)
    falling = [10.0 - 0.1 * step for step in range(20)]
    assert not any(spikes.is_spike(loss) for loss in falling)
    assert not spikes.is_spike(float("nan"))
    assert spikes.is_spike(30.0)
    assert not spikes.is_spike(8.0)


def test_a_flat_curve_has_no_spikes():
    spikes = LossSpikes(window=10)
    assert not any(spikes.is_spike(2.0) for _ in range(20))
    assert not spikes.is_spike(2.1)
    assert spikes.is_spike(2.3)


def test_the_time_limit():
    assert not StopRequests(minutes=60).requested
    stops = StopRequests()
    stops.limit(None)
    assert not stops.requested
    stops.limit(0.0)
    assert stops.requested


def test_a_signal_is_noted_and_one_passed_on_again_is_the_same():
    before = signal.getsignal(signal.SIGUSR1)
    try:
        stops = StopRequests([signal.SIGUSR1])
        assert not stops.requested
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stops.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_that_ends_ignores_every_signal_that_it_listened_to():
    """`--exit-signal SIGUSR2` too."""
    numbers = signal.SIGUSR1, signal.SIGUSR2
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        stops = StopRequests([signal.SIGUSR1])
        stops.listen(signal.SIGUSR2)
        stops.ignore()
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 2
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TrainingFault("replicas differ"), ["finish", "end True", "close"]),
        (RuntimeError("this rank alone"), ["end False", "close"]),
    ],
)
def test_a_checkpoint_in_the_background_is_finished_before_all_ranks_end(error, expected):
    seen: list[str] = []
    loop = Loop.__new__(Loop)
    loop.callbacks = ()
    loop.checkpoints = SimpleNamespace(finish=lambda: seen.append("finish"), close=lambda: seen.append("close"))
    loop.end = lambda *, complete=True: seen.append(f"end {complete}")

    def fail() -> int:
        raise error

    loop._train = fail
    with pytest.raises(type(error)):
        loop.run()
    assert seen == expected


def test_a_second_signal_ends_the_process():
    program = (
        "import time; from megatron_async.training import signals as s; "
        "s._ECHO_SECONDS = 0.0; r = s.StopRequests(s.ALWAYS); print('ready', flush=True); "
        "[time.sleep(0.01) for _ in iter(lambda: r.requested, True)]; print('noted', flush=True); time.sleep(300)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"noted\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(200) == 128 + signal.SIGUSR1
    process.stdout.close()


def test_a_silent_neighbor_is_named():
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer\nand a long trace")

    with pytest.raises(LinkFailure, match=r"nothing arrived from rank 3: Connection closed by peer$"):
        _wait(Broken(), "nothing arrived from rank 3")  # type: ignore[arg-type]
