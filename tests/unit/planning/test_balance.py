# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`--pipeline-balance` and `--plan-device`: where they apply, what they choose, what they refuse."""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_async import platform

platform.activate("cpu")

from megatron_async.config import arguments  # noqa: E402
from megatron_async.mcore.training import num_floating_point_operations  # noqa: E402
from megatron_async.planning import balance, devices  # noqa: E402
from megatron_async.planning.costs import CostModel  # noqa: E402
from megatron_async.planning.estimate import Plan, plan  # noqa: E402
from megatron_async.planning.judge import fastest, pairs  # noqa: E402
from megatron_async.planning.parameters import blocks  # noqa: E402
from megatron_async.planning.split import cut, on_ranks  # noqa: E402
from megatron_async.planning.timing import (  # noqa: E402
    CAUSES,
    BlockTime,
    batch_seconds,
    period,
    simulator,
    stage_costs,
)

H100 = devices.find("h100")
HYBRID = (
    "--model moe-10b-hybrid --bf16 --pipeline-schedule 2bw --optimizer muon --staleness-correction error-feedback "
    "--micro-batch-size 1 --global-batch-size 512 --expert-model-parallel-size 8 --use-distributed-optimizer "
)
RECOMPUTED = f"{HYBRID} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def imbalance(planned: Plan) -> float:
    """Idle share if every rank waited for the slowest one alone."""
    added = planned.time.idle["imbalance"]
    return added / (planned.time.compute + added)


@pytest.fixture
def parsed(monkeypatch):
    def parse(words: str, devices_of_job: int = 2, device: str = "h100"):
        monkeypatch.setenv("WORLD_SIZE", str(devices_of_job))
        return arguments.parse(["--device", "cpu", "--plan-device", device, *words.split(), "--dry-run"])

    return parse


def test_layer_norms_of_gpus_are_counted_too(parsed):
    """torch's LayerNorm refuses what Transformer Engine's can do; the model of a plan is built from torch's layers."""
    args = parsed(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000"
    )
    assert args.normalization == "LayerNorm"
    on_gpus = {"sequence_parallel": True, "apply_layernorm_1p": True, "no_persist_layer_norm": False}
    assert blocks(argparse.Namespace(**vars(args) | on_gpus | {"persist_layer_norm": True})) == blocks(args)


def test_norms_of_queries_without_a_latent_are_left_out(parsed):
    """Only Transformer Engine's layers have them."""
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--normalization RMSNorm --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000 --multi-latent-attention"
    )
    args = parsed(words)
    assert blocks(argparse.Namespace(**vars(args) | {"qk_layernorm": True})) == blocks(args)


def problems(parsed, words: str) -> str:
    with pytest.raises(arguments.ArgumentProblems) as found:
        parsed(words)
    return str(found.value)


TINY = "--model tiny --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2"


def test_delayed_runs_on_gpus_are_balanced_unless_a_split_is_given(parsed):
    chosen = parsed(f"{TINY} --pipeline-schedule 2bw")
    assert (chosen.pipeline_balance, chosen.pipeline_model_parallel_layout) == ("auto", "Et*5|t*3L")
    for words, device, kept in [
        ("--pipeline-schedule 1f1b", "h100", "even"),
        ("--pipeline-schedule 2bw", "cpu", "even"),
        ("--pipeline-schedule 2bw --pipeline-balance even", "h100", "even"),
        ("--pipeline-schedule 2bw --decoder-first-pipeline-num-layers 3", "h100", "given"),
    ]:
        args = parsed(f"{TINY} {words}", device=device)
        assert (args.pipeline_balance, args.pipeline_model_parallel_layout) == (kept, None)
    args = parsed(f"{TINY} --pipeline-schedule 1f1b --pipeline-balance auto")
    assert args.pipeline_model_parallel_layout == "Et*5|t*3L"
    assert args._resolved["pipeline_model_parallel_layout"] == "Et*5|t*3L"


PATTERN = "--model nemotron-h-mini --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2"


def test_a_pattern_is_cut_and_stages_that_are_given_are_kept(parsed):
    args = parsed(f"{PATTERN} --pipeline-schedule 2bw")
    assert (args.pipeline_balance, args.pipeline_model_parallel_layout) == ("auto", None)
    assert args.hybrid_layer_pattern == args._resolved["hybrid_layer_pattern"] == "M-M*MEM-|M*ME"
    assert f"--hybrid-layer-pattern '{args.hybrid_layer_pattern}'" in args._balance[0]
    even = parsed(f"{PATTERN} --pipeline-schedule 2bw --pipeline-balance even")
    assert even.hybrid_layer_pattern == "M-M*ME|M-M*ME"
    given = parsed(f"{PATTERN} --pipeline-schedule 2bw --hybrid-layer-pattern M-M*|MEM-M*ME")
    assert (given.pipeline_balance, given.hybrid_layer_pattern) == ("given", "M-M*|MEM-M*ME")
    assert "it has a split of its own" in problems(
        parsed, f"{PATTERN} --hybrid-layer-pattern M-M*|MEM-M*ME --pipeline-balance auto"
    )
    assert imbalance(plan(args)) < imbalance(plan(even))
    halves = parsed(f"{PATTERN} --pipeline-schedule wpipe --untie-embeddings-and-output-weights")
    assert halves.hybrid_layer_pattern.count("|") == 3 and halves.virtual_pipeline_model_parallel_size == 2


def test_the_pattern_of_a_gpt_may_be_cut_within_its_layers(parsed):
    """Attention and block are layers of their own: the row is finer, the costs are the same."""
    models = (TINY, f"{TINY} --hybrid-layer-pattern {'*-' * 8}")
    one, two = (parsed(f"{model} --pipeline-schedule 2bw", device="cpu") for model in models)
    assert two.hybrid_layer_pattern == "*-*-*-*-|*-*-*-*-"
    by_gpt, by_hybrid = (CostModel(args, H100).blocks(blocks(args)) for args in (one, two))
    layers = [(own.total, own.launches) for own in by_gpt[1:-1]]
    halves = zip(by_hybrid[1:-1:2], by_hybrid[2:-1:2], strict=True)
    for (first, second), (seconds, launches) in zip(halves, layers, strict=True):
        assert first.total + second.total == pytest.approx(seconds)
        assert first.launches + second.launches == pytest.approx(launches)
    cut_one, cut_two = (parsed(f"{model} --pipeline-schedule 2bw") for model in models)
    assert imbalance(plan(cut_two)) <= imbalance(plan(cut_one))
    assert cut_two.hybrid_layer_pattern == "*-*-*-*-*-*|-*-*-"


def test_layers_that_do_not_divide_are_split(parsed):
    assert parsed(f"{TINY} --num-layers 7 --pipeline-schedule 2bw").pipeline_model_parallel_layout == "Et*5|t*2L"
    assert "cannot be split evenly" in problems(parsed, f"{TINY} --num-layers 7 --pipeline-schedule 1f1b")


def test_contradictions_are_refused(parsed):
    text = problems(
        parsed, f"{TINY} --pipeline-schedule 2bw --pipeline-balance auto --decoder-first-pipeline-num-layers 3"
    )
    assert "--pipeline-balance auto with --decoder-first-pipeline-num-layers" in text
    assert "one stage holds all layers" in problems(parsed, "--model tiny --pipeline-balance measured")
    assert "no such device or file. Known: a100" in problems(parsed, f"{TINY} --plan-device h1000")


def test_both_halves_of_wpipe_are_balanced(parsed):
    args = parsed(f"{TINY} --pipeline-schedule wpipe")
    sizes = [len(stage.layers) for stage in plan(args).stages]
    assert args.virtual_pipeline_model_parallel_size == 2 and sum(sizes) == 8
    even = parsed(f"{TINY} --pipeline-schedule wpipe --pipeline-balance even")
    assert plan(args).simulated.steady_bubble_share < 0.7 * plan(even).simulated.steady_bubble_share


@pytest.mark.parametrize("schedule", ["2bw", "wpipe"])
def test_the_largest_model_on_64_devices(parsed, schedule):
    """At most 5 % of imbalance on 4 stages. On 8 the head alone is slower than the mean stage: no split is faster."""
    result = plan(parsed(f"{RECOMPUTED} --pipeline-model-parallel-size 4 --pipeline-schedule {schedule}", 64))
    assert imbalance(result) < 0.0505
    assert max(sum(held.values()) for held in result.bytes_by_kind) < H100.memory_bytes
    if schedule == "2bw":
        args = parsed(f"{RECOMPUTED} --pipeline-model-parallel-size 8", 64)
        result = plan(args)
        layer_times = [own.of_batch(result.microbatches) for own in CostModel(args, H100).blocks(blocks(args))]
        least = _least(layer_times, 8)
        assert max(result.compute) == pytest.approx(least)


def _least(times: list[float], parts: int) -> float:
    """Time of the slowest part in the best split, by bisection over greedy fillings."""
    sums = sorted({sum(times[i:j]) for i, j in itertools.combinations(range(len(times) + 1), 2)})

    def possible(limit: float) -> bool:
        used, filled = 1, 0.0
        for own in times:
            if own > limit:
                return False
            if filled + own > limit * (1 + 1e-12):
                used, filled = used + 1, 0.0
            filled += own
        return used <= parts

    return next(limit for limit in sums if possible(limit))


def test_costs_agree_with_megatrons_count(parsed):
    """Of the FLOPs of a batch of one sequence, forward and backward. Megatron leaves routers and convolutions out."""
    mamba = "nemotron-h-mini --hidden-size 1024 --ffn-hidden-size 4096"
    for model in ("smollm2-135m", "moe-2b", "moe-10b-hybrid", mamba):
        args = parsed(f"--model {model} --bf16 --micro-batch-size 1", 1)
        layers = args.num_layers if args.hybrid_layer_pattern is None else args.hybrid_layer_pattern.count("E")
        router = (args.num_experts or 0) * args.hidden_size * layers
        expected = num_floating_point_operations(args, 1) + 6 * args.seq_length * router
        assert 3 * sum(CostModel(args, H100).flops(blocks(args))) == pytest.approx(expected, rel=0.002)


def test_a_case_without_split_says_what_would_fit(parsed):
    args = parsed(f"{HYBRID} --pipeline-model-parallel-size 4", 64)
    model = blocks(args)
    times = CostModel(args, H100).blocks(model)
    tight = balance.choose(args, model, times).bytes // 2
    with pytest.raises(balance.NoSplit, match="no split of 24 layers over 4 stages keeps every device within") as found:
        balance.choose(args, model, times, tight)
    assert found.value.least > tight
    assert "--recompute-granularity full" in balance.would_fit(args, model, tight)
    assert balance.would_fit(args, model, 2**30).startswith("Use more stages")


def test_less_memory_gives_another_split(parsed):
    """2bw keeps most micro-batches on the first stage: with little memory it gets fewer layers."""
    args = parsed(f"{HYBRID} --pipeline-model-parallel-size 4", 64)
    model = blocks(args)
    times = CostModel(args, H100).blocks(model)
    free = balance.choose(args, model, times)
    tight = balance.choose(args, model, times, int(0.85 * free.bytes))
    assert tight.bytes <= 0.85 * free.bytes and tight.ends[0] < free.ends[0]


@pytest.mark.parametrize(
    "more",
    [
        "--pipeline-schedule 2bw --bf16 --staleness-correction error-feedback --optimizer muon",
        "--pipeline-schedule 2bw-eager --use-distributed-optimizer --bf16",
        "--pipeline-schedule 2bw --optimizer muon --use-distributed-optimizer --bf16",
        "--pipeline-schedule wpipe --untie-embeddings-and-output-weights --staleness-correction dc-asgd",
        "--pipeline-schedule 2bw --freeze-all-layers",
    ],
)
def test_a_split_needs_the_bytes_that_its_plan_has(parsed, more):
    args = parsed(f"{TINY} {more} --pipeline-balance auto", 4)
    model = blocks(args)
    chosen = balance.choose(args, model, CostModel(args, H100).blocks(model))
    assert balance.split_option(args, chosen.ends)[1] == str(args.pipeline_model_parallel_layout)
    planned = max(sum(held.values()) for held in plan(args).bytes_by_kind)
    assert chosen.bytes == pytest.approx(planned, abs=8)  # each kind is rounded up


def test_idle_time_has_causes(parsed):
    few = plan(
        parsed(f"{HYBRID} --pipeline-model-parallel-size 4 --pipeline-schedule 1f1b --staleness-correction none", 64)
    )
    assert tuple(few.time.idle) == CAUSES and few.time.idle["schedule"] > 0.04 * few.time.seconds
    delayed = plan(parsed(f"{HYBRID} --pipeline-model-parallel-size 4", 64))
    assert delayed.time.idle["schedule"] < 1e-3 * delayed.time.seconds
    assert delayed.time.seconds == pytest.approx(delayed.time.compute + sum(delayed.time.idle.values()))


def test_every_device_file_is_complete_and_can_be_written(tmp_path: Path):
    for name in devices.NAMES:
        known = devices.find(name)
        devices.write(tmp_path / f"{name}.toml", known)
        assert devices.find(str(tmp_path / f"{name}.toml")) == known
    quoted = replace(known, name="quoted", description='a "new" device \\')
    devices.write(tmp_path / "quoted.toml", quoted)
    assert devices.find(str(tmp_path / "quoted.toml")) == quoted
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("efficiency = -1\ncores = 3\nmemory-bandwidth = inf\n[flops]\nfp32 = 1.0\n", encoding="utf-8")
    with pytest.raises(ValueError) as found:
        devices.find(str(wrong))
    for text in ("memory-gib is missing", "cores is unknown", "efficiency -1: must be a positive number", "with bf16"):
        assert text in str(found.value)
    assert "memory-bandwidth inf: must be a positive number" in str(found.value)


@pytest.mark.parametrize(("schedule", "stages", "chunks"), [("2bw", 4, 1), ("2bw-eager", 4, 1), ("wpipe", 2, 2)])
def test_the_split_is_the_best_of_all_under_the_simulator(schedule, stages, chunks):
    """Measured times (ms) of the hybrid's miniature on a CPU: embedding, eight layers of two kinds, head."""
    times = (8.7, *(515.1, 515.1, 515.1, 357.7) * 2, 680.3)

    def seconds(ends: tuple[int, ...]) -> float:
        rows = list(zip((0, *ends), ends, strict=False))
        parts = [
            [[BlockTime(own / 3, own * 2 / 3) for own in times[slice(*row)]] for row in rows[stage::stages]]
            for stage in range(stages)
        ]
        return period(simulator(schedule, stages, 2 * stages), stage_costs(parts))

    if chunks == 1:
        sums = [sum(times[:end]) for end in range(len(times) + 1)]
        chosen = cut(len(times), stages, lambda part, start, end: sums[end] - sums[start])
    else:
        chosen = pairs(schedule, times, stages)[0]
    inner = itertools.combinations(range(2, len(times)), stages * chunks - 1)
    assert seconds(chosen) <= 1.001 * min(seconds((*ends, len(times))) for ends in inner)


@pytest.mark.parametrize("schedule", ["2bw", "2bw-eager"])
def test_updates_count_where_stages_are_balanced(schedule):
    """A large vocabulary: milliseconds about as measured on a CPU. With many micro-batches updates hardly count."""
    microbatches = 4
    layer = BlockTime(3.5, 5.0, update=0.45 * microbatches)
    embedding, head = BlockTime(0.4, 0.6, update=5.0 * microbatches), BlockTime(29.0, 32.0, update=3.7 * microbatches)
    times = [embedding, *[layer] * 8, head]

    def seconds(ends: tuple[int, ...]) -> float:
        return batch_seconds(schedule, stage_costs(on_ranks(times, ends, 2)), microbatches)

    best = fastest(schedule, times, 2, microbatches)
    assert best == min(((end, len(times)) for end in range(2, len(times))), key=seconds) == (8, 10)
    without = fastest(schedule, [replace(own, update=0.0) for own in times], 2, microbatches)
    assert without == fastest(schedule, times, 2, 100 * microbatches) == (9, 10)
    assert seconds(without) > 1.02 * seconds(best)
