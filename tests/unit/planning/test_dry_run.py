# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--dry-run`, `--model list`, and the rules about models and layouts."""

import json

import pytest

from megatron_async import pretrain
from megatron_async.planning import units

HYBRID = "--model moe-10b-hybrid-mini"


def run(capsys, words: str) -> tuple[int, str, str]:
    status = pretrain.main(["--device", "cpu", *words.split()])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def planned(capsys, words: str) -> dict:
    status, out, err = run(capsys, f"{words} --dry-run")
    assert status == 0, err
    return json.loads(out.splitlines()[-1])


def test_needs_no_data_no_second_process_and_no_batch_size(capsys):
    plan = planned(capsys, f"{HYBRID} --pipeline-model-parallel-size 2 --pipeline-schedule 2bw")
    assert plan["parameters"]["total"] == 5_169_648
    assert plan["parameters"]["active"] == 2_220_528
    assert plan["arguments"]["world_size"] == 2
    assert plan["schedule"]["schedule"] == "2bw"
    assert plan["schedule"]["bubble_share"] < 0.3
    assert [stage["weight_versions"] for stage in plan["schedule"]["stage"]] == [2, 2]


def test_uneven_layers_land_where_they_should(capsys):
    plan = planned(capsys, f"{HYBRID} --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et*5|t|t*2L")
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 1, 2, 3, 4], [5], [6, 7]]
    first, middle, last = (stage["parameters"] for stage in plan["stages"])
    # Layers 3 and 7 (from 0) have softmax attention.
    assert set(first) == {"embedding", "attention", "linear_attention", "router", "experts", "shared_expert", "norm"}
    assert set(middle) == {"linear_attention", "router", "experts", "shared_expert", "norm"}
    assert set(last) == {"attention", "linear_attention", "router", "experts", "shared_expert", "norm", "head"}
    assert first["attention"] == last["attention"]
    total = sum(sum(stage["parameters"].values()) for stage in plan["stages"])
    assert total == plan["parameters"]["total"]


def test_bytes_by_hand(capsys):
    """A dense model in bf16 on two stages with Muon and error feedback."""
    plan = planned(
        capsys,
        "--model tiny --bf16 --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --optimizer muon "
        "--staleness-correction error-feedback --micro-batch-size 1 --global-batch-size 4",
    )
    tiny = {"matrices": 4 * (128 * 256 + 128 * 128 + 3 * 128 * 384), "vectors": 4 * 2 * 128, "table": 4096 * 128}
    for index, stage in enumerate(plan["stages"]):
        vectors = tiny["vectors"] + (128 if index == 1 else 0)
        size = tiny["matrices"] + vectors + tiny["table"]
        held = stage["bytes"]
        assert stage["parameters_per_rank"] == size
        assert held["weights"] == held["second_weight_version"] == 2 * size
        assert held["gradients"] == held["second_gradient_generation"] == held["correction"] == 4 * size
        # fp32 masters; one momentum for matrices, two moments for the rest.
        assert held["optimizer_state"] == 4 * size + 4 * tiny["matrices"] + 8 * (vectors + tiny["table"])
        assert held["total"] == sum(value for kind, value in held.items() if kind != "total")
    activations = [stage["bytes"]["activations"] for stage in plan["stages"]]
    logits = 128 * 4096 * (2 + 4)
    # Two sent messages and the next one to receive; scores of one layer's four heads.
    working = 3 * 128 * 128 * 2 + 4 * 128 * 128 * 2
    assert activations[0] - working == 2 * (activations[1] - logits - working)


def test_a_frozen_model_holds_weights_and_activations(capsys):
    words = "--model tiny --bf16 --pipeline-model-parallel-size 2 --pipeline-schedule 2bw --global-batch-size 4"
    trained, frozen = (planned(capsys, f"{words} {more}")["stages"] for more in ("", "--freeze-all-layers"))
    for before, after in zip(trained, frozen, strict=True):
        held = {kind: size for kind, size in after["bytes"].items() if size and kind != "total"}
        assert held == {kind: before["bytes"][kind] for kind in ("weights", "activations")}


def test_the_distributed_optimizer_is_sharded(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    alone = planned(capsys, "--model tiny --micro-batch-size 1 --global-batch-size 4")
    sharded = planned(capsys, "--model tiny --micro-batch-size 1 --global-batch-size 4 --use-distributed-optimizer")
    whole, part = (plan["stages"][0]["bytes"]["optimizer_state"] for plan in (alone, sharded))
    assert part == pytest.approx(whole / 4, abs=1)


def test_more_devices_than_the_layout_needs(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    plan = planned(capsys, f"{HYBRID} --pipeline-model-parallel-size 2 --expert-model-parallel-size 4")
    assert plan["arguments"]["data_parallel_size"] == 8
    assert plan["parameters"]["total"] == 5_169_648


def test_numbers_for_people():
    assert [units.amount(count) for count in (0, 999, 134_515_008, 10.12e9)] == ["0", "999", "134.5M", "10.12B"]
    assert [units.size(count) for count in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]


def test_the_correction_keeps_nothing_where_there_is_no_delay(capsys):
    """The second half of WPipe, the last stage of PipeDream; the table shows a column for the others."""
    common = "--model tiny --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2"
    held = [
        stage["bytes"]
        for stage in planned(capsys, f"{common} --staleness-correction dc-asgd --pipeline-schedule pipedream")["stages"]
    ]
    assert held[0]["correction"] == held[0]["weights"] and held[1]["correction"] == 0
    (first, last) = planned(capsys, f"{common} --staleness-correction weight-prediction --pipeline-schedule wpipe")[
        "stages"
    ]
    for stage in (first, last):
        assert 0 < stage["bytes"]["correction"] < 0.7 * stage["bytes"]["weights"]


def test_model_list(capsys):
    status, out, _ = run(capsys, "--model list")
    assert status == 0
    assert "moe-10b-hybrid" in out and "10.12B" in out and "646.7M" in out and "134.5M" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{HYBRID} --tensor-model-parallel-size 3 --sequence-parallel", "--linear-num-key-heads 4 cannot be divided"),
        (f"{HYBRID} --tensor-model-parallel-size 3 --sequence-parallel", "--num-attention-heads 8 cannot be divided"),
        (f"{HYBRID} --expert-model-parallel-size 3", "--num-experts 32 cannot be divided"),
        (f"{HYBRID} --moe-router-topk 40", "--moe-router-topk 40 is more than --num-experts 32"),
        ("--model smollm2-135m --use-cpu-initialization", "--use-cpu-initialization: not supported: initial weights"),
        (f"{HYBRID} --pipeline-model-parallel-size 9", "leaves a stage without a layer"),
        (
            f"{HYBRID} --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 8",
            "leaves a stage without a layer",
        ),
        (
            f"{HYBRID} --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et*4||t*4L",
            "part 1 (from 0) is empty",
        ),
        (f"{HYBRID} --dataloader-inter-document-masking", "cannot take packed sequences"),
        ("--model smollm2-135m --dataloader-inter-document-masking", "documents would see each other"),
        ("--model smollm4", "no such preset"),
    ],
)
def test_impossible_models_and_layouts_are_refused(capsys, words, message):
    status, out, err = run(capsys, f"{words} --dry-run")
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
