# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The evaluation: its messages, and a small task beside log-likelihoods of transformers where lm-eval is installed."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_async.cli import evaluate
from megatron_async.data.preprocessing.tokenizer import save_tokenizer, train_tokenizer

QUESTIONS = [
    {"question": f"{n} times {n} is", "choices": [f" {n * n}", f" {n + 20}"], "answer": n % 2} for n in range(4, 16)
]
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_every_problem_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert evaluate.main(["--load", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "pip install 'megatron_async[evaluate]'" in said and "no config.json" in said
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert evaluate.main(["--load", str(tmp_path)]) == 2
    assert "with --tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "tasks", "rest"),
    [([], ",".join(evaluate.PAPER_TASKS), []), (["--limit", "3", "--tasks", "a", "b"], "a,b", ["--limit", "3"])],
)
def test_lm_eval_is_given_tasks_and_its_own_options(tmp_path: Path, monkeypatch, given, tasks, rest) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command: commands.append(command) or 7)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert evaluate.main(["--load", str(tmp_path), *given]) == 7
    model = ["--model", "hf", "--model_args", f"pretrained={tmp_path},dtype=auto"]
    assert commands[0][1:] == ["-m", "lm_eval", *model, "--tasks", tasks, "--batch_size", "auto", *rest]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small random Llama with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "hf"
    save_tokenizer(train_tokenizer([row["question"] + "".join(row["choices"]) for row in QUESTIONS], 280), folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes, max_position_embeddings=64)).save_pretrained(folder)
    return folder


def likelihood(model, tokenizer, question: str, choice: str) -> float:
    """Log-likelihood of the choice after the question."""
    start = len(tokenizer(question)["input_ids"])
    tokens = torch.tensor(tokenizer(question + choice)["input_ids"])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0].log_softmax(-1)
    return float(sum(logits[place - 1, tokens[place]] for place in range(start, len(tokens))))


def test_a_small_task(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from transformers import AutoTokenizer, LlamaForCausalLM

    data = tmp_path / "tiny.json"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    words = f"--load {folder} --tasks tiny --include_path {tmp_path / 'tasks'} --device cpu --batch_size 4"
    assert evaluate.main([*words.split(), "--output_path", str(tmp_path / "results.json")]) == 0
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for row in QUESTIONS:
        scores = [likelihood(model, tokenizer, row["question"], choice) for choice in row["choices"]]
        right += scores[row["answer"]] > scores[1 - row["answer"]]
    assert 0 < right < len(QUESTIONS), "a task that tells models apart"
    (written,) = tmp_path.glob("results*.json")
    found = json.loads(written.read_text(encoding="utf-8"))
    assert found["results"]["tiny"]["acc,none"] == right / len(QUESTIONS)
    assert evaluate.main(["--load", str(folder), "--tasks", "tinny"]) != 0
