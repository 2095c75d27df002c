# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Effects of options that show without a run: what is built from checked arguments."""

import base64
import json
import logging
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest

from megatron_async import platform

platform.activate("cpu")

from megatron.core import jit  # noqa: E402
from megatron.core import optimizer as megatron_optimizer  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.training import global_vars, initialize, training  # noqa: E402

from megatron_async.config import arguments  # noqa: E402
from megatron_async.mcore import parallel  # noqa: E402
from tests.distributed.jobs import BASE, line  # noqa: E402


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")


def loss_scaler(*words):
    args = arguments.parse([*BASE, "--fp16", *words])
    config, _ = training.get_megatron_optimizer_config(args)
    with parallel.alone(args):
        return megatron_optimizer._get_megatron_optimizer_based_on_param_groups(config, [], []).grad_scaler


def scales(scaler, overflows):
    found = []
    for overflow in overflows:
        scaler.update(overflow)
        found.append(float(scaler.scale))
    return found


def test_the_loss_scale_falls_and_grows():
    """From --initial-loss-scale: halved after --hysteresis overflows, doubled after --loss-scale-window batches."""
    words = "--initial-loss-scale 16 --min-loss-scale 4 --loss-scale-window 3 --hysteresis 2".split()
    assert scales(loss_scaler(*words), [True] * 5) == [16, 8, 4, 4, 4]
    assert scales(loss_scaler(*words), [False] * 7) == [16, 16, 32, 32, 32, 64, 64]
    assert scales(loss_scaler(*words, "--hysteresis", "4"), [True] * 5) == [16, 16, 16, 8, 4]


def test_the_last_decay_counts_samples(monkeypatch):
    """--lr-wsd-decay-samples: the rate is constant, and falls linearly over the last samples."""
    counted = (
        "--train-samples 40 --global-batch-size 4 --lr 1.0 --min-lr 0 --lr-decay-style WSD --lr-wsd-decay-style linear"
    )

    def rates(samples):
        args = arguments.parse(line([*counted.split(), "--lr-wsd-decay-samples", str(samples)]))
        monkeypatch.setattr(training, "get_args", lambda: args)
        group = {"lr": 0.0, "weight_decay": 0.0}
        scheduler = training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[group]))
        return [scheduler.get_lr(group) for _ in range(10) if scheduler.step(4) is None]

    assert rates(8) == pytest.approx([1.0] * 8 + [0.5, 0.0])
    assert rates(16) == pytest.approx([1.0] * 6 + [0.75, 0.5, 0.25, 0.0])


def tokenizer(*words):
    base = [word for word in BASE if word not in ("--tokenizer-type", "NullTokenizer", "--vocab-size", "61")]
    return build_tokenizer(arguments.parse([*base, *map(str, words)]))


def test_the_ends_of_documents_without_a_tokenizer():
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 61)
    assert tokenizer(*null).eod == 60
    made = tokenizer(*null, "--null-tokenizer-eod-id", 5, "--null-tokenizer-pad-id", 7)
    assert (made.eod, made.pad) == (5, 7)


def test_tiktoken_cuts_words_and_keeps_ids_for_special_tokens(tmp_path):
    """--tiktoken-pattern and --tiktoken-num-special-tokens: v1 lets a word hold two kinds of letters, v2 cuts there."""
    pairs = [bytes([byte]) for byte in range(256)] + [b"aB"]
    ranks = [
        {"rank": rank, "token_bytes": base64.b64encode(pair).decode(), "token_str": str(rank)}
        for rank, pair in enumerate(pairs)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(ranks))

    def made(pattern, special):
        return tokenizer(
            *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", tmp_path / "vocab.json"),
            *("--vocab-size", 257 + special, "--tiktoken-pattern", pattern, "--tiktoken-num-special-tokens", special),
        )

    assert made("v1", 10).tokenize("aB") == [266]
    assert made("v1", 20).tokenize("aB") == [276]
    assert made("v2", 10).tokenize("aB") == [10 + ord("a"), 10 + ord("B")]


class Reached(Exception):
    """The call that a test looks at."""


@pytest.fixture
def made(monkeypatch):
    """What the first process group is made with; the call raises `Reached`."""
    options: dict[str, object] = {}

    def init_process_group(**given):
        options.update(given)
        raise Reached

    monkeypatch.setattr(parallel.dist, "init_process_group", init_process_group)
    return options


def test_process_groups_wait_as_long_as_they_are_told(made):
    """--distributed-timeout-minutes and --distributed-backend."""
    with pytest.raises(Reached):
        parallel.initialize(arguments.parse([*BASE, "--distributed-timeout-minutes", "3"]))
    assert (made["timeout"], made["backend"]) == (timedelta(minutes=3), "gloo")


def test_the_flight_recorder_is_set_up_before_the_first_group(made, monkeypatch):
    """On GPUs Megatron makes that group. Variables that are set stay."""
    words = (
        "--flight-recorder-dump-path mine --flight-recorder-trace-buffer-size 7 --no-flight-recorder-dump-on-timeout "
        "--flight-recorder-include-stack-trace --no-flight-recorder-include-only-active "
        "--no-flight-recorder-extra-dump-on-exec --distributed-timeout-minutes 3"
    )
    args = arguments.parse([*BASE, *words.split()])
    environ = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}
    monkeypatch.setattr(initialize, "os", SimpleNamespace(environ=environ, path=os.path))
    monkeypatch.setattr(initialize, "get_args", lambda: args)
    with pytest.raises(Reached):
        initialize._initialize_distributed(None, None, None)
    assert made["timeout"] == timedelta(minutes=3) and environ == {
        "TORCH_FR_DUMP_TEMP_FILE": "mine",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "9",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_INCLUDE_STACK_TRACE": "1",
        "TORCH_INCLUDE_ONLY_ACTIVE": "0",
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": "0",
    }


@pytest.mark.parametrize("words", [[], ["--disable-gloo-process-groups"]])
def test_groups_over_gloo_beside_those_of_nccl(monkeypatch, words):
    """On GPUs Megatron makes them, unless --disable-gloo-process-groups is given."""
    args, given, options = arguments.parse(BASE), arguments.make_parser().parse_args(words), {}
    args.use_gloo_process_groups = given.use_gloo_process_groups  # on CPUs it has one value

    def initialize_model_parallel(*sizes, **others):
        options.update(others)
        raise Reached

    monkeypatch.setattr(initialize, "get_args", lambda: args)
    monkeypatch.setattr(initialize.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(initialize.torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(initialize.torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(initialize.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(initialize.mpu, "initialize_model_parallel", initialize_model_parallel)
    with pytest.raises(Reached):
        initialize._initialize_distributed(None, None, None)
    assert options["create_gloo_process_groups"] == (not words)


def test_nothing_is_compiled_on_request(monkeypatch):
    """--disable-jit-fuser: Megatron's decorator leaves functions as they are."""
    monkeypatch.setattr(jit, "jit_fuser", "a compiler")
    for words in ([], ["--disable-jit-fuser"]):
        assert jit.jit_fuser == "a compiler"
        global_vars.set_global_variables(arguments.parse([*BASE, *words]), build_tokenizer=False)
        training.destroy_global_state()
    assert jit.jit_fuser(scales) is scales


def test_loggers_say_as_much_as_they_are_told(monkeypatch):
    """--logging-level."""
    root, args = logging.getLogger(), arguments.parse([*BASE, "--logging-level", "13"])
    monkeypatch.setattr(root, "level", root.level)  # set back afterwards
    monkeypatch.setattr(initialize, "get_args", lambda: args)
    initialize.setup_logging()
    assert root.level == 13
