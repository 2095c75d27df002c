# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Tokenize text into Megatron's indexed data sets (.bin, .idx). Flags as in Megatron-LM.

Reads JSON lines, plain text, Parquet and `datasets` sources. Key K goes to PREFIX_K_document.bin and .idx.
Exit status 2: the input or an option cannot be used; standard error says why, and no output is written.
"""

import argparse
import sys
from dataclasses import fields

from megatron_async import platform
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
    parser = argparse.ArgumentParser(
        prog="megatron-async preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_input(parser.add_argument_group("input"))
    _add_output(parser.add_argument_group("output"))
    _add_ignored(parser.add_argument_group("accepted for Megatron-LM's scripts, without effect"))
    _add_tokenizer(parser.add_argument_group("tokenizer"))
    return parser


def _add_input(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input", nargs="+", required=True, help="files, quoted patterns (** for folders) or folders")
    group.add_argument("--input-format", choices=FORMATS, help="how to read them (default: by their names)")
    group.add_argument("--json-keys", nargs="+", default=["text"], help="fields that hold text (default: text)")
    group.add_argument(
        "--text-unit",
        choices=TEXT_UNITS,
        default="file",
        help="one document of a plain text file (default: file)",
    )
    group.add_argument("--dataset-config", help="configuration name of a data set")
    group.add_argument("--dataset-split", default="train", help="split of a data set (default: train)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-prefix", required=True, help="path of the files without _KEY_document.bin")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    group.add_argument("--log-interval", type=int, default=1000, help="documents between two reports (default: 1000)")


def _add_ignored(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--partitions", type=int, help="the work is shared between --workers without parting files")
    group.add_argument("--keep-sequential-samples", action="store_true", help="the order is always the input's")


def _add_tokenizer(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer-type", required=True, help="for example HuggingFaceTokenizer or NullTokenizer")
    group.add_argument("--tokenizer-model", help="file or folder of the tokenizer")
    group.add_argument("--vocab-file")
    group.add_argument("--merge-file")
    group.add_argument("--vocab-size", type=int, help="for NullTokenizer and TikTokenizer")
    group.add_argument("--tiktoken-pattern")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000)
    group.add_argument("--tokenizer-special-tokens", dest="special_tokens", nargs="+")
    group.add_argument("--tokenizer-metadata", dest="metadata_path")
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true")
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true")
    group.add_argument("--trust-remote-code", action="store_true")
