# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A small run of 60 batches on two stages."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async.files import read_json_lines

ROOT = Path(__file__).resolve().parents[2]
_RUN = (
    "--device cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 0.01 --weight-decay 0.1 "
    "--optimizer muon --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --staleness-correction error-feedback "
    "--split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 61 --eval-iters 0 --num-workers 0 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --seed 7 "
    "--attention-dropout 0.1 --keep-last 3"
)
_TIMES = {"iteration_ms", "tokens_per_s", "tflops_per_device", "bubble_share", "stage_compute_ms", "stage_hint"}


def environment(**more: str) -> dict[str, str]:
    """Variables of every process of a run."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"} | more


def write_documents(prefix: str) -> str:
    """A data set of 400 documents; returns its prefix."""
    from megatron_async import platform

    platform.activate("cpu")
    from megatron_async.data.preprocessing.indexed import IndexedWriter

    generator = np.random.default_rng(3)
    with IndexedWriter(prefix, 61) as writer:
        for _ in range(400):
            writer.add(np.minimum(generator.geometric(0.1, generator.integers(20, 90)), 60))
        writer.commit()
    return prefix


@dataclass(frozen=True)
class Run:
    """A run with its folder."""

    folder: Path
    prefix: str
    length: int = 60
    save_interval: int = 10

    @property
    def saves(self) -> Path:
        return self.folder / "saves"

    @property
    def arguments(self) -> list[str]:
        """Arguments of `megatron_async.pretrain`, the same for every start."""
        save, metrics = str(self.saves), str(self.folder / "metrics.jsonl")
        own = ["--data-path", self.prefix, "--save", save, "--load", save, "--metrics-file", metrics]
        return [*_RUN.split(), *own, f"--train-iters={self.length}", f"--save-interval={self.save_interval}"]

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the metrics file without times and settings."""
        path = self.folder / "metrics.jsonl"
        rows = read_json_lines(path) if path.exists() else []
        return [{key: row[key] for key in row if key not in _TIMES} for row in rows if "config" not in row]

    @property
    def batches(self) -> int:
        """Completed batches."""
        return len(self.rows())

    def assert_equal(self, other: "Run") -> None:
        """Whole, without gaps and doubles, and bit-equal to another run."""
        assert [row["iteration"] for row in self.rows()] == list(range(1, self.length + 1))
        assert self.rows() == other.rows()
