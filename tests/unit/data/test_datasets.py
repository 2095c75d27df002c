# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megatron_async.data.blend import DataSources
from megatron_async.data.datasets import (
    dataset_config,
    is_built_on_rank,
    sufficient_surplus,
    train_valid_test_datasets,
)

from .conftest import MakeArguments, write_data

END = 999
TOKENIZER = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--seq-length", "8")


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """Each set says with its tokens which one it is."""
    return {
        name: write_data(tmp_path / name, [[token] * 16 + [END]] * 200)
        for token, name in enumerate(("a", "b", "c"), start=1)
    }


def build(make: MakeArguments, words: tuple[str, ...], samples: tuple[int | None, ...]) -> tuple[Any, Any, Any]:
    return train_valid_test_datasets(make(*TOKENIZER, *words), samples)


def test_shared_data_is_split(data: dict[str, str], make_arguments: MakeArguments) -> None:
    train, valid, test = build(make_arguments, ("--data-path", data["a"], "--split", "90,10,0"), (50, 10, 10))
    assert type(train) is GPTDataset and len(train) >= 50 and len(valid) >= 10 and test is None
    assert not set(train.indices) & set(valid.indices)
    assert len(train.indices) == 180 and len(valid.indices) == 20
    sample = train[0]
    assert sample["tokens"].dtype == torch.int64 and sample["tokens"].shape == (8,)
    assert sample["attention_mask"].shape == (1, 8, 8)


def test_separate_parts(data: dict[str, str], make_arguments: MakeArguments) -> None:
    words = ("--train-data-path", data["a"], "--valid-data-path", data["b"])
    train, valid, test = build(make_arguments, words, (20, 5, 5))
    assert set(torch.cat([train[i]["tokens"] for i in range(20)]).tolist()) <= {1, END}
    assert set(torch.cat([valid[i]["tokens"] for i in range(5)]).tolist()) <= {2, END}
    assert test is None


def test_labels_follow_tokens(tmp_path: Path, make_arguments: MakeArguments) -> None:
    prefix = write_data(tmp_path / "count", [list(range(161))])
    train, _, _ = build(make_arguments, ("--train-data-path", prefix), (20, 0, 0))
    starts = sorted(train[i]["tokens"][0].item() for i in range(20))
    assert starts == list(range(0, 160, 8))
    assert all(torch.equal(train[i]["labels"], train[i]["tokens"] + 1) for i in range(20))


def test_prepared_orders(data: dict[str, str], tmp_path: Path, make_arguments: MakeArguments) -> None:
    """--dataloader-defer-npy-index-mmap opens them at the first sample, --dataloader-fast-cache-load looks for none."""
    words = ("--train-data-path", data["a"], "--data-cache-path")
    expected = build(make_arguments, (*words, str(tmp_path / "cache")), (20, 0, 0))[0]
    (order,) = (tmp_path / "cache").rglob("*document_index.npy")
    late = build(make_arguments, (*words, str(order.parent), "--dataloader-defer-npy-index-mmap"), (20, 0, 0))[0]
    assert late.document_index is None
    assert all(torch.equal(late[i]["tokens"], expected[i]["tokens"]) for i in range(20))
    assert late.document_index is not None
    fast = (*words, str(tmp_path / "none"), "--dataloader-fast-cache-load")
    with pytest.raises(FileNotFoundError, match=r"document_index\.npy"):
        build(make_arguments, fast, (20, 0, 0))
    fast = (*words, str(order.parent), "--dataloader-fast-cache-load")
    assert torch.equal(build(make_arguments, fast, (20, 0, 0))[0][7]["tokens"], expected[7]["tokens"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Megatron's set that failed to open
def test_known_sizes_of_data_sets(data: dict[str, str], tmp_path: Path, make_arguments: MakeArguments) -> None:
    """--per-dataset-sequences-path: the header of an index is not read."""
    words = ("--train-data-path", data["a"])
    expected = build(make_arguments, words, (20, 0, 0))[0]
    index = Path(f"{data['a']}.idx")
    index.write_bytes(b"?" * 9 + index.read_bytes()[9:])
    with pytest.raises(AssertionError, match="bad header"):
        build(make_arguments, words, (20, 0, 0))
    (tmp_path / "sizes.json").write_text(json.dumps({data["a"]: [200, 201]}))
    known = build(make_arguments, (*words, "--per-dataset-sequences-path", str(tmp_path / "sizes.json")), (20, 0, 0))[0]
    assert all(torch.equal(known[i]["tokens"], expected[i]["tokens"]) for i in range(20))


def test_document_boundaries(tmp_path: Path, make_arguments: MakeArguments) -> None:
    prefix = write_data(tmp_path / "documents", [[1, 2, END]] * 3)
    words = ("--train-data-path", prefix, "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    sample = build(make_arguments, words, (1, 0, 0))[0][0]
    assert sample["tokens"].tolist() == [1, 2, END, 1, 2, END, 1, 2]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 1, 0, 1, 1]
    visible = ~sample["attention_mask"][0]
    assert visible[4].tolist() == [False, False, False, True, True, False, False, False]
    plain = build(make_arguments, words[:2], (1, 0, 0))[0][0]
    assert plain["position_ids"].tolist() == list(range(8)) and plain["loss_mask"].tolist() == [1] * 8
    without = build(make_arguments, (*words[:2], "--no-create-attention-mask-in-dataloader"), (1, 0, 0))[0][0]
    assert "attention_mask" not in without


def test_mock_data(make_arguments: MakeArguments) -> None:
    train, valid, test = build(make_arguments, ("--mock-data", "--seq-length", "512"), (20, 5, 5))
    assert all(type(part) is MockGPTDataset for part in (train, valid, test))
    assert train[3]["tokens"].max() < 1000


# Blends


@pytest.mark.parametrize(
    ("weights", "samples", "expected"), [((0.3, 0.7), 10, [3, 7]), ((1, 2, 7), 1000, [100, 200, 700])]
)
def test_shares(
    data: dict[str, str],
    make_arguments: MakeArguments,
    weights: tuple[float, ...],
    samples: int,
    expected: list[int],
) -> None:
    names = list(data.values())[: len(weights)]
    words = [str(word) for pair in zip(weights, names, strict=True) for word in pair]
    train, _, _ = build(make_arguments, ("--data-path", *words, "--split", "100,0,0"), (samples, 0, 0))
    assert type(train) is BlendedDataset
    assert [dataset.dataset_path for dataset in train.datasets] == names
    # The tokens themselves say which set a sample came from.
    drawn = np.bincount([min(train[i]["tokens"]).item() for i in range(samples)], minlength=len(weights) + 1)
    assert drawn[1:].tolist() == expected
    normalized = np.asarray(weights) / sum(weights)
    for length in range(1, samples + 1):
        counts = np.bincount(train.dataset_index[:length], minlength=len(weights))
        assert np.all(np.abs(counts - normalized * length) <= 2)


def test_order_depends_on_the_seed(data: dict[str, str], make_arguments: MakeArguments) -> None:
    words = ("--train-data-path", data["a"])

    def order(seed: int, parallel: int) -> list[int]:
        args = make_arguments(*TOKENIZER, *words, "--seed", str(seed))
        args.data_parallel_size = parallel
        return train_valid_test_datasets(args, (50, 0, 0))[0].shuffle_index.tolist()

    assert order(1, 1) == order(1, 4) != order(2, 1)


@pytest.mark.parametrize(
    "weights", [(0.001, 0.999), (1e-5, 1 - 1e-5), (0.3, 0.7), (0.9, *[0.01] * 10), tuple([0.05] * 20)]
)
def test_no_set_runs_out(weights: tuple[float, ...]) -> None:
    """Sets that hold exactly what Megatron prepares of them must satisfy the blend at every length."""
    from megatron.core.datasets import helpers

    shares = (np.asarray(weights) / sum(weights)).tolist()
    for samples in [*range(1, 120), *range(120, 2001, 47)]:
        surplus = sufficient_surplus(weights, samples, 0.005)
        targets = np.ceil(samples * np.asarray(shares))
        total = int(targets.sum())
        index = np.zeros(total, dtype=np.int16)
        helpers.build_blending_indices(index, np.zeros(total, dtype=np.int64), shares, len(shares), total, False)
        drawn = np.bincount(index, minlength=len(shares))
        assert np.all(drawn <= np.ceil(targets * (1 + surplus))), samples


def test_surplus_stays_as_given_where_it_suffices() -> None:
    assert sufficient_surplus((0.3, 0.7), 1000, 0.005) == 0.005
    assert sufficient_surplus((0.9, *[0.01] * 10), 1, 0.005) > 1
    assert sufficient_surplus((0.9, *[0.01] * 10), 1, 9.0) == 9.0


def test_many_small_sets_end_to_end(tmp_path: Path, make_arguments: MakeArguments) -> None:
    # One epoch of each set is one sample, so Megatron prepares hardly more than it was told to.
    words = []
    for number, weight in enumerate((0.9, *[0.01] * 10)):
        words += [str(weight), write_data(tmp_path / str(number), [[number] * 9])]
    train, _, _ = build(make_arguments, ("--train-data-path", *words), (5, 0, 0))
    assert len(train) >= 5 and len(train[4]["tokens"]) == 8


# The cache of sample orders


def cached(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*.npy")}


def test_cache_hit_and_stale_data(tmp_path: Path, data: dict[str, str], make_arguments: MakeArguments) -> None:
    cache = tmp_path / "cache"
    words = ("--train-data-path", data["a"], "--data-cache-path", str(cache))
    build(make_arguments, words, (30, 0, 0))
    first = cached(cache)
    assert first
    build(make_arguments, words, (30, 0, 0))
    assert cached(cache) == first
    # The same name with fewer documents: an order made for the old ones would point past the end.
    write_data(Path(data["a"]), [[7] * 5 + [END]] * 6)
    train, _, _ = build(make_arguments, words, (30, 0, 0))
    assert set(train.document_index.tolist()) == set(range(6))
    assert train[0]["tokens"].shape == (8,)


@pytest.mark.parametrize("change", [("--seed", "5"), ("--seq-length", "4"), ("--vocab-size", "1001")])
def test_other_arguments_make_another_order(
    tmp_path: Path, data: dict[str, str], make_arguments: MakeArguments, change: tuple[str, ...]
) -> None:
    words = ("--train-data-path", data["a"], "--data-cache-path", str(tmp_path / "cache"))
    build(make_arguments, words, (30, 0, 0))
    first = cached(tmp_path / "cache")
    build(make_arguments, (*words, *change), (30, 0, 0))
    assert len(cached(tmp_path / "cache")) == 2 * len(first)


def test_build_that_was_killed(tmp_path: Path, data: dict[str, str], make_arguments: MakeArguments) -> None:
    words = ("--train-data-path", data["a"], "--data-cache-path", str(tmp_path / "cache"))
    train, _, _ = build(make_arguments, words, (30, 0, 0))
    expected = train.shuffle_index.tolist()
    for path in (tmp_path / "cache").rglob("*.npy"):
        path.write_bytes(path.read_bytes()[:40])
        (path.parent / ".building").touch()
    train, _, _ = build(make_arguments, words, (30, 0, 0))
    assert train.shuffle_index.tolist() == expected


# Configuration


def test_every_configuration_field_is_set(make_arguments: MakeArguments) -> None:
    """A field that Megatron adds must be looked at; those listed have no argument."""
    args = make_arguments(*TOKENIZER, "--mock-data")
    used: list[str] = []

    class Recorder(GPTDatasetConfig):
        def __init__(self, **fields: Any) -> None:
            used.extend(fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_async.data.datasets.GPTDatasetConfig", Recorder)
        dataset_config(args, DataSources(None, None, ()), None, (1, 1, 1), None)
    without_argument = {"drop_last_partial_validation_sequence", "add_extra_token_to_sequence"}
    settable = {field.name for field in GPTDatasetConfig.__dataclass_fields__.values() if field.init}
    assert set(used) | without_argument == settable and not set(used) & without_argument


@pytest.mark.parametrize("tensor_rank", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_read(
    make_arguments: MakeArguments, monkeypatch: pytest.MonkeyPatch, tensor_rank: int, stage: int
) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda **_: stage == 0)
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda **_: stage == 2)
    assert is_built_on_rank(make_arguments()) == (tensor_rank == 0 and stage != 1)
    assert is_built_on_rank(make_arguments("--dataloader-inter-document-masking")) == (tensor_rank == 0)


def test_contradictory_words_are_refused(make_arguments: MakeArguments) -> None:
    with pytest.raises(ValueError, match="weight 0 of"):
        build(make_arguments, ("--train-data-path", "0", "none"), (1, 0, 0))


def test_one_document_per_sequence(tmp_path: Path, make_arguments: MakeArguments) -> None:
    """Each step from a token to the next one is predicted once an epoch, and none from a document to another."""
    documents = [[1], [2, END], list(range(10, 19)), list(range(30, 56)), [5, 6, 7, END]]
    words = ("--train-data-path", write_data(tmp_path / "documents", documents), "--one-document-per-sequence")
    train, _, _ = build(make_arguments, words, (12, 0, 0))
    assert len(train) == 14, "whole epochs of 1 + 1 + 4 + 1 sequences"
    train[train.shuffle_index.tolist().index(0)]  # the shortest sequence first: nothing of its mask is kept
    steps = []
    for index in range(7):
        sample = train[index]
        real = sample["loss_mask"].bool()
        assert not sample["labels"][~real].any() and sample["tokens"].shape == (8,)
        steps += list(zip(sample["tokens"][real].tolist(), sample["labels"][real].tolist(), strict=True))
    assert sorted(steps) == sorted(pair for document in documents for pair in pairwise(document))
    orders = [[train[index]["tokens"][0].item() for index in range(start, start + 7)] for start in (0, 7)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def samples_of(dataset: Any, count: int) -> list[list[int]]:
    return [dataset[number]["tokens"].tolist() for number in range(count)]


@pytest.mark.parametrize("word", ["--no-mmap-bin-files", "--num-dataset-builder-threads=2"])
def test_ways_to_read_give_the_same_samples(word: str, data: dict[str, str], make_arguments: MakeArguments) -> None:
    blend = ("--train-data-path", "1", data["a"], "2", data["b"])
    plain, _, _ = build(make_arguments, blend, (30, 0, 0))
    other, _, _ = build(make_arguments, (*blend, word), (30, 0, 0))
    assert samples_of(other, 30) == samples_of(plain, 30)
    readers = [type(train.datasets[0].dataset.bin_reader).__name__ for train in (plain, other)]
    assert (readers[0] == readers[1]) == ("threads" in word), "files are mapped into memory, or read"


def test_surplus_of_the_sets_in_a_blend(data: dict[str, str], make_arguments: MakeArguments) -> None:
    """--mid-level-dataset-surplus: how many samples more each set has than its share."""
    blend = ("--train-data-path", "1", data["a"], "1", data["b"])
    asked = [
        build(make_arguments, (*blend, "--mid-level-dataset-surplus", surplus), (400, 0, 0))[0].datasets[0].num_samples
        for surplus in ("0.01", "0.5")
    ]
    assert asked == [202, 300]


def test_padding_that_is_also_an_end(data: dict[str, str], make_arguments: MakeArguments) -> None:
    """--allow-ambiguous-pad-tokens masks the loss of such tokens; without it they are ends of documents."""
    words = ("--train-data-path", data["a"], "--null-tokenizer-pad-id", str(END))
    masks = []
    for more in ((), ("--allow-ambiguous-pad-tokens",)):
        train, _, _ = build(make_arguments, (*words, *more), (20, 0, 0))
        masks.append(torch.cat([train[number]["loss_mask"] for number in range(20)]))
    assert masks[0].all() and not masks[1].all()
