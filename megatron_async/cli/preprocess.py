# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Tokenize text into Megatron's indexed data sets (.bin, .idx). Flags as in Megatron-LM.

Reads JSON lines, plain text, Parquet and `datasets` sources. Key K goes to PREFIX_K_document.bin and .idx.
Exit status 2: the input or an option cannot be used; standard error says why, and no output is written.
"""

import argparse
import sys
from dataclasses import fields
from typing import Any

from megatron_async import platform
from megatron_async.cli import make_parser
from megatron_async.data.preprocessing.preprocess import InputError, PreprocessOptions, Progress, preprocess
from megatron_async.data.preprocessing.sources import FORMATS, TEXT_UNITS
from megatron_async.data.preprocessing.tokenizer import tokenizer_namespace


def main(argv: list[str] | None = None) -> int:
    """Run the tool; return the exit status, 2 for input that cannot be used."""
    chosen = vars(_parser().parse_args(argv))
    options = PreprocessOptions(
        inputs=tuple(chosen.pop("input")),
        keys=tuple(chosen.pop("json_keys")),
        **{field.name: chosen.pop(field.name) for field in fields(PreprocessOptions) if field.name in chosen},
    )
    del chosen["partitions"], chosen["keep_sequential_samples"]
    platform.activate_or_exit("cpu")
    try:
        done = preprocess(options, tokenizer_namespace(**chosen), _report)
    except InputError as error:
        print("megatron-async preprocess: nothing was written:", *error.problems, sep="\n  ", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"megatron-async preprocess: nothing was written: {error}", file=sys.stderr)
        return 1
    print(f"{done.documents:,} documents, {done.tokens:,} tokens, {done.empty:,} empty texts left out")
    for key in options.keys:
        print(f"{options.output(key)}.bin, .idx")
    return 0


def _report(progress: Progress) -> None:
    seconds = max(progress.seconds, 1e-9)
    print(
        f"{progress.documents:,} documents, {progress.documents / seconds:,.0f} documents/s, "
        f"{progress.bytes / seconds / 1e6:.2f} MB/s",
        file=sys.stderr,
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("preprocess", __doc__)
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for flag, keywords in options.items():
            group.add_argument(flag, **keywords)
    return parser


_SWITCH = {"action": "store_true"}
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "input": {
        "--input": {"nargs": "+", "required": True, "help": "files, quoted patterns (** for folders) or folders"},
        "--input-format": {"choices": FORMATS, "help": "how to read them (default: by their names)"},
        "--json-keys": {"nargs": "+", "default": ["text"], "help": "fields that hold text (default: text)"},
        "--text-unit": {
            "choices": TEXT_UNITS,
            "default": "file",
            "help": "a document of plain text (default: file)",
        },
        "--dataset-config": {"help": "configuration name of a data set"},
        "--dataset-split": {"default": "train", "help": "split of a data set (default: train)"},
    },
    "output": {
        "--output-prefix": {"required": True, "help": "path of the files without _KEY_document.bin"},
        "--append-eod": _SWITCH | {"help": "end each document with the end-of-document token"},
        "--workers": {"type": int, "default": 1, "help": "processes that tokenize (default: 1)"},
        "--log-interval": {"type": int, "default": 1000, "help": "documents between two reports (default: 1000)"},
    },
    "accepted for Megatron-LM's scripts, without effect": {
        "--partitions": {"type": int, "help": "the work is shared between --workers without parting files"},
        "--keep-sequential-samples": _SWITCH | {"help": "the order is always the input's"},
    },
    "tokenizer": {
        "--tokenizer-type": {"required": True, "help": "for example HuggingFaceTokenizer or NullTokenizer"},
        "--tokenizer-model": {"help": "file or folder of the tokenizer"},
        "--vocab-file": {},
        "--merge-file": {},
        "--vocab-size": {"type": int, "help": "for NullTokenizer and TikTokenizer"},
        "--tiktoken-pattern": {},
        "--tiktoken-num-special-tokens": {"type": int, "default": 1000},
        "--tokenizer-special-tokens": {"dest": "special_tokens", "nargs": "+"},
        "--tokenizer-metadata": {"dest": "metadata_path"},
        "--tokenizer-hf-no-use-fast": _SWITCH,
        "--tokenizer-hf-no-include-special-tokens": _SWITCH,
        "--trust-remote-code": _SWITCH,
    },
}
"""Options by group."""
