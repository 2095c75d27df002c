# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Conversion from and to checkpoints of split models, through the command-line tool."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

ROOT = Path(__file__).resolve().parents[2]
MODEL = "--model moe-10b-hybrid-mini --num-layers 4 --num-experts 8"
LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "EP2": "--expert-model-parallel-size 2",
}


def convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    return tool("convert_checkpoint.py", *arguments)


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def exported(pool, tmp_path_factory):
    """A model after three batches, saved by a tensor-parallel run, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("conversion")
    save = f"{MODEL} {LAYOUTS['TP2']} --save {folder / 'megatron'} --save-interval 1"
    pool.run("tests.distributed.model_jobs:first_losses", save.split(), ranks=2)
    done = convert("to-hf", "--load", str(folder / "megatron"), "--save", str(folder / "hf"), "--vocab-size", "61")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_split_checkpoint_goes_out_and_comes_back(pool, exported):
    weights = load_file(exported / "hf" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (61, 128)
    done = convert("from-hf", "--load", str(exported / "hf"), "--save", str(exported / "start"))
    assert done.returncode == 0, done.stderr
    assert "--finetune --num-layers 4" in done.stdout
    again = convert("to-hf", "--load", str(exported / "start"), "--save", str(exported / "again"))
    assert again.returncode == 0, again.stderr
    repeated = load_file(exported / "again" / "model.safetensors")
    assert repeated.keys() == weights.keys()
    assert all(torch.equal(repeated[name], value) for name, value in weights.items())
    config = json.loads((exported / "again" / "config.json").read_text())
    assert config["eos_token_id"] == 60, "the run's end of documents, so that generation stops"
    assert config == json.loads((exported / "hf" / "config.json").read_text())
    # Every layout starts from the converted weights: the loss of the first batch is the same.
    losses = {}
    for name, split in LAYOUTS.items():
        start = f"{MODEL} {split} --load {exported / 'start'} --finetune --train-iters 1"
        outcomes = pool.run("tests.distributed.model_jobs:first_losses", start.split(), ranks=2)
        losses[name] = next(losses for losses in outcomes if losses)[0]
    assert max(losses.values()) == pytest.approx(min(losses.values()), rel=1e-5)
    fresh = pool.run("tests.distributed.model_jobs:first_losses", f"{MODEL} --train-iters 1".split(), ranks=1)
    assert losses["PP2"] < fresh[0][0] - 0.05, "the loaded model has been trained"


def test_a_damaged_newest_checkpoint_is_skipped_as_a_run_skips_it(pool, exported, tmp_path):
    folder = tmp_path / "megatron"
    shutil.copytree(exported / "megatron", folder)
    with (folder / "iter_0000003" / "__0_0.distcp").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    resume = f"{MODEL} {LAYOUTS['TP2']} --load {folder}"
    outcomes = pool.run("tests.distributed.model_jobs:first_losses", resume.split(), ranks=2)
    assert [len(losses) for losses in outcomes] == [1, 1], "the run continues after batch 2"

    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    Tokenizer(WordLevel({f"{token}": token for token in range(61)}, unk_token="0")).save(
        str(tokenizer / "tokenizer.json")
    )
    prompt = ["--tokenizer", str(tokenizer), "--prompt", "7", "--max-new-tokens", "4"]
    for name, *rest in (
        ("convert_checkpoint.py", "to-hf", "--save", str(tmp_path / "hf"), "--vocab-size", "61"),
        ("generate.py", *prompt),
    ):
        done = tool(name, *rest, "--load", str(folder))
        assert done.returncode == 0, done.stderr
        assert f"skipped a damaged checkpoint: {folder / 'iter_0000003'}: __0_0.distcp has changed" in done.stderr
        refused = tool(name, *rest, "--load", str(folder), "--ckpt-step", "3")
        assert refused.returncode == 2 and "--ckpt-step 3: no complete checkpoint" in refused.stderr
    whole = tmp_path / "second"
    done = convert(
        "to-hf", "--load", str(exported / "megatron"), *("--ckpt-step", "2"), "--save", str(whole), "--vocab-size", "61"
    )
    assert done.returncode == 0, done.stderr
    weights, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", whole))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    done = convert("to-hf", "--load", str(tmp_path), "--save", str(tmp_path / "hf"))
    assert done.returncode == 2
    assert "no Megatron checkpoint of format torch_dist" in done.stderr
    assert "Traceback" not in done.stderr
