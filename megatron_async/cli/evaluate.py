# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Evaluate a Hugging Face folder with lm-eval, by default on the eight tasks of arXiv 2606.30634, table 4.

    megatron-async convert to-hf --load runs/mine/checkpoints --save runs/mine/hf --tokenizer FOLDER
    megatron-async evaluate --load runs/mine/hf --output_path runs/mine/evaluation

Other options are lm-eval's own (`python -m lm_eval run --help`), such as --include_path, --num_fewshot, --limit,
--device and --output_path.

lm-eval downloads the tasks' data unless they are in the cache of datasets. It is not part of the default install:
pip install 'megatron_async[evaluate]'.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_async.cli import make_parser, refuse

PAPER_TASKS = ("arc_challenge", "arc_easy", "copa", "hellaswag", "mmlu", "openbookqa", "piqa", "winogrande")
"""Tasks of the paper's table 4. It states neither numbers of examples in the prompt nor which accuracy it takes."""


def main(argv: list[str] | None = None) -> int:
    """Exit status: lm-eval's, or 2 if something stands in the way; every reason is printed."""
    parser = make_parser("evaluate", __doc__)
    parser.add_argument("--load", type=Path, required=True, help="Hugging Face folder with weights and tokenizer")
    parser.add_argument("--tasks", nargs="+", default=PAPER_TASKS, metavar="TASK", help="default: the paper's")
    parser.add_argument("--batch_size", default="auto", help="sequences in a batch (default: %(default)s)")
    options, others = parser.parse_known_args(argv)
    if problems := list(_problems(options.load)):
        return refuse("evaluate", "nothing was evaluated", problems)
    model = ["--model", "hf", "--model_args", f"pretrained={options.load},dtype=auto"]
    run = ["--tasks", ",".join(options.tasks), "--batch_size", options.batch_size, *others]
    return subprocess.call([sys.executable, "-m", "lm_eval", *model, *run])


def _problems(folder: Path) -> Iterator[str]:
    if importlib.util.find_spec("lm_eval") is None:
        yield "lm-eval is not installed: pip install 'megatron_async[evaluate]'."
    if not (folder / "config.json").is_file():
        yield (
            f"--load {folder}: no config.json, so no Hugging Face folder. `megatron-async convert to-hf` makes one "
            "from a checkpoint."
        )
    elif not (folder / "tokenizer_config.json").is_file():
        yield f"--load {folder}: no tokenizer. Give `megatron-async convert to-hf` its folder with --tokenizer."
