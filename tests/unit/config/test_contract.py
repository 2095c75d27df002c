# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The contract of options: each option of Megatron's parser has a status, and the status is true."""

import argparse
import fnmatch
import inspect
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from megatron_async import platform

platform.activate("cpu")

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megatron_async.checkpoint import on_resume  # noqa: E402
from megatron_async.config import arguments  # noqa: E402
from megatron_async.config.contract import explain  # noqa: E402
from megatron_async.config.contract.check import ROWS, rows_of  # noqa: E402
from megatron_async.config.contract.row import CONDITIONS  # noqa: E402
from megatron_async.config.parser import make_parser  # noqa: E402
from megatron_async.mcore.arguments import add_megatron_options  # noqa: E402
from megatron_async.mcore.training import gpt_config_from_args  # noqa: E402
from tests.distributed.jobs import BASE  # noqa: E402
from tests.distributed.options import other_value  # noqa: E402
from tools import document  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TWO_BW = "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw".split()


@pytest.fixture(scope="module")
def megatron():
    """Megatron's options: first spelling without dashes -> action."""
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    add_megatron_options(parser)
    return {action.option_strings[0].lstrip("-"): action for action in parser._actions if action.option_strings}


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


def problems(*words):
    with pytest.raises(arguments.ArgumentProblems) as raised:
        arguments.parse([*BASE, *TWO_BW, *words])
    return raised.value.problems


@pytest.mark.parametrize(("schedule", "objects"), [("1f1b", True), ("2bw", False)])
def test_tensor_parallel_delayed_runs_need_no_single_hardware_queue(monkeypatch, schedule, objects):
    """Megatron demands it before Blackwell."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = f"--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule {schedule}".split()
    try:
        arguments.parse([*BASE, *words])
        found = []
    except arguments.ArgumentProblems as wrong:
        found = list(wrong.problems)
    assert [("CUDA_DEVICE_MAX_CONNECTIONS to 1" in one) for one in found] == [True] * objects


def without_status(flags):
    return [flag for flag in flags if sum(not row.when and value is None for row, value in rows_of(flag)) != 1]


def test_every_option_has_one_status(megatron):
    assert len(megatron) > 800
    assert without_status(megatron) == []
    assert without_status(["an-option-of-another-megatron"]) != []


def test_no_row_names_an_option_that_is_not_there(megatron):
    assert [flag for row in ROWS for flag, _ in row.entries if not fnmatch.filter(megatron, flag)] == []


def test_single_values_are_choices(megatron):
    for row in ROWS:
        for flag, value in row.entries:
            if value is not None:
                choices = [getattr(choice, "name", choice) for choice in megatron[flag].choices]
                assert value in choices, f"--{flag} {value}"


def test_rows_are_complete():
    for row in ROWS:
        assert bool(row.instead) == (row.status == "refused")
        assert bool(row.shown_by) == (row.status == "as in Megatron")
        assert row.options and row.reason and row.when in CONDITIONS and not row.reason.endswith(".")


def test_the_named_test_names_the_option(megatron):
    texts = {row.shown_by: (ROOT / row.shown_by).read_text(encoding="utf-8") for row in ROWS if row.shown_by}
    missing = [
        f"--{flag}: {row.shown_by}"
        for row in ROWS
        if row.shown_by
        for flag, _ in row.entries
        if f"--{flag}" not in texts[row.shown_by] and megatron[flag].dest not in texts[row.shown_by]
    ]
    assert missing == []


def test_the_pages_are_up_to_date():
    for path, page in document.pages().items():
        assert page == path.read_text(encoding="utf-8"), f"{path}: run python tools/document.py"


YARN = "no-yarn-correction-range-round-to-int"  # the opposite of another option, which is given


def test_every_refused_option_is_refused_with_a_reason(megatron):
    """All at once: each is named with its own reason, none is empty, and nothing else fails because of them."""
    rows = [
        (row, flag, value)
        for flag in megatron
        for row, value in rows_of(flag)
        if row.status == "refused" and flag != YARN
    ]
    words = [
        word for row, flag, value in rows for word in ([f"--{flag}", value] if value else other_value(megatron[flag]))
    ]
    found = problems(*words)
    assert all(problem.strip() for problem in found)
    for _, flag, value in rows:
        own = [problem for problem in found if problem.partition(":")[0].split()[0] == f"--{flag}"]
        assert own, f"--{flag} {value or ''}"


def test_options_without_their_texts_are_the_same():
    """A run leaves out the help texts that Megatron looks up in its sources."""

    def own(texts: bool):
        actions = make_parser(texts=texts)._actions
        left_out = "help", "container", "type"
        return [
            {name: value for name, value in vars(action).items() if name not in left_out}
            | {"type": getattr(action.type, "__qualname__", None)}
            for action in actions
        ], sum(not action.help for action in actions)

    (whole, no_help), (bare, less_help) = own(True), own(False)
    assert whole == bare and less_help > no_help + 100


def words_of_every_option():
    """Another value for each option of Megatron's, with what it says about the job left out."""
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    add_megatron_options(parser)
    return [tuple(other_value(action)) for action in parser._actions if action.dest not in SIZES]


SIZES = ("num_layers", "rank", "local_rank")


@seed(20261129)
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_five_options_at_once_are_taken_or_refused(data):
    """Never a traceback, never an empty reason, whatever is combined."""
    chosen = data.draw(st.lists(st.sampled_from(EVERY), min_size=5, max_size=5, unique=True))
    try:
        arguments.parse([*BASE, *TWO_BW, *(word for words in chosen for word in words)])
    except arguments.ArgumentProblems as wrong:
        assert wrong.problems and all(len(problem.split()) > 2 for problem in wrong.problems), wrong.problems


EVERY = words_of_every_option()


def test_a_refused_value_is_taken_where_its_condition_does_not_hold():
    assert arguments.parse([*BASE, "--fp16", "--pipeline-model-parallel-size", "2"]).fp16


def test_an_inert_option_is_named_once():
    args = arguments.parse([*BASE, *TWO_BW, "--log-throughput", "--overlap-grad-reduce"])
    overlap, throughput = args._notices
    assert throughput.startswith("--log-throughput has no effect here: every log line")
    assert overlap.startswith("--overlap-grad-reduce")
    assert arguments.parse([*BASE, *TWO_BW])._notices == []


@pytest.mark.parametrize(
    "words", ["--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank 2"]
)
def test_a_delayed_schedule_replaces_the_interleaved_one(words):
    args = arguments.parse([*BASE, *TWO_BW, *words.split()])
    (notice,) = args._notices
    assert notice.startswith(words.split()[0]) and args.virtual_pipeline_model_parallel_size is None
    synchronous = arguments.parse([*BASE, *TWO_BW[:2], *words.split()])
    assert synchronous.virtual_pipeline_model_parallel_size == 2 and synchronous._notices == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--swiglu --squared-relu", "--swiglu and --squared-relu: a feed-forward block has one"),
        ("--normalization LayerNorm --apply-layernorm-1p", "torch's LayerNorm cannot do it"),
        (
            "--num-experts 4 --moe-ffn-hidden-size 8 --moe-token-dispatcher-type alltoall "
            "--moe-expert-capacity-factor 4 --moe-pad-expert-input-to-capacity",
            "more tokens than there are; at most --num-experts / --moe-router-topk = 2.",
        ),
        ("--perform-rl-step", "this package pretrains"),
        ("--is-hybrid-model", "Use --hybrid-layer-pattern"),
        ("--adlr-autoresume", "nothing would be trained"),
    ],
)
def test_reasons(words, text):
    (problem,) = problems(*words.split())
    assert text in problem


def test_explain():
    text, known = explain.explain("--ddp-average-in-collective --fp16 --hidden-size 3 --disable-manual-gc-eval".split())
    assert known and [line.split(":")[0] for line in text.splitlines()] == [
        "--ddp-average-in-collective",
        "--fp16",
        "--fp16",
        "--hidden-size",
        "--no-manual-gc-eval",
    ]
    assert "refused with a gradient delay: its dynamic loss scale" in text
    text, known = explain.explain(["--keep-last", "--no-such-thing"])
    assert not known and "an option of megatron_async" in text and "--no-such-thing: no such option" in text


# Options of the model that a resumed run may change: random numbers, initial weights, precision, memory, ablations.
FREE = """hidden-dropout attention-dropout init-method-std embedding-init-method-std apply-query-key-layer-scaling
attention-softmax-in-fp32 padded-vocab-size use-rotary-position-embeddings moe-router-dtype moe-input-jitter-eps
moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-token-drop-policy moe-layer-recompute
moe-router-quantile-balancing-ema moe-router-force-load-balancing""".split()


def test_every_option_of_the_model_has_a_rule_for_a_resume(megatron, checked):
    fixed = [name for row in on_resume.TABLE for name in row.names]
    assert len(fixed) == len(set(fixed)) and all(hasattr(checked, name) for name in fixed)
    options = [
        flag for row in ROWS if row.shown_by and row.reason.startswith("part of the ") for flag, _ in row.entries
    ]
    assert len(options) > 60
    assert [flag for flag in options if (megatron[flag].dest in fixed) == (flag in FREE)] == []
    named = {on_resume.option(name).removeprefix("--") for name in fixed} - set(megatron)
    assert named == set(), "an option that the message names"


@pytest.fixture(scope="module")
def checked():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "1")
        return arguments.parse(BASE)


def test_kernels_reach_the_configuration_of_the_model(checked):
    """--cross-entropy-fusion-impl, --no-persist-layer-norm"""
    args = argparse.Namespace(**vars(checked) | {"vocab_size": 61, "cross_entropy_fusion_impl": "te"})
    args.no_persist_layer_norm = False
    config = gpt_config_from_args(args).transformer
    assert config.cross_entropy_fusion_impl == "te" and config.persist_layer_norm


READERS = {
    build_tokenizer: "tokenizer_hf_no_use_fast",
    TransformerConfig: "moe_permute_fusion",
}
"""What a run calls, and the arguments that it reads, where an effect would need a GPU, a service or a network."""


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_arguments_are_read(reader):
    source = inspect.getsource(reader)
    assert [name for name in READERS[reader].split() if not re.search(rf"\b{name}\b", source)] == []
