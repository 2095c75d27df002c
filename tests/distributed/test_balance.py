# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""A run that times its layers first: one split on all ranks, kept in the manifest; a resume may change it."""

import pytest

from megatron_async.checkpoint import folder
from megatron_async.files import read_json_lines
from tests.distributed.matrix import MODELS

RUN = f"--optimizer adam {MODELS['moe']} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --vocab-size 2000"


def test_a_measured_split_trains_is_kept_and_may_change(pool, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    saving = f"{RUN} --pipeline-balance measured --save {tmp_path} --save-interval 3 --train-iters 3 --lr-decay-iters 6"
    watching = f"--log-stage-balance 3 --metrics-file {metrics}"
    first, last = pool.run("tests.distributed.jobs:train", f"{saving} {watching}".split(), ranks=2)
    manifest = folder.newest(tmp_path).manifest
    layout = manifest.arguments["pipeline_model_parallel_layout"]
    assert layout.startswith("Et") and layout.endswith("L") and manifest.arguments["pipeline_balance"] == "measured"
    layers = [{name.split(".")[2] for name in own.weights if ".layers." in name} for own in (first, last)]
    assert layers[0] | layers[1] == set("0123") and not layers[0] & layers[1]
    assert len(layers[0]) == (int(layout.split("|")[0].removeprefix("Et*")) if "*" in layout.split("|")[0] else 1)
    rows = [row for row in read_json_lines(metrics) if "stage_compute_ms" in row]
    assert [row["iteration"] for row in rows] == [3] and len(rows[0]["stage_compute_ms"]) == 2
    assert min(rows[0]["stage_compute_ms"]) > 0
    resumed = f"{RUN} --pipeline-balance even --load {tmp_path} --lr-decay-iters 6".split()
    *_, again = pool.run("tests.distributed.jobs:train", resumed, ranks=2)
    *_, whole = pool.run("tests.distributed.jobs:train", f"{RUN} --lr-decay-iters 6".split(), ranks=2)
    assert [*last.losses, *again.losses] == pytest.approx(whole.losses, rel=2e-5)
