# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Prepare a corpus without a download: the standard library's source, with its tokenizer and data files."""

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/ is not installed

from megatron_async import platform
from megatron_async.data.preprocessing.prepare import PartCounts, prepare_corpus


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; return the exit status, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="runs/data/stdlib", help="folder for the files (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens in the vocabulary (default: %(default)s)")
    options = parser.parse_args(arguments)
    platform.activate_or_exit("cpu")
    try:
        corpus = prepare_corpus(options.output, options.vocab_size)
    except (ValueError, OSError) as error:
        print(f"prepare_corpus: {error}", file=sys.stderr)
        return 2
    print(f"folder      {corpus.folder}")
    print(f"tokenizer   {corpus.tokenizer} ({corpus.vocab_size} tokens)")
    print(f"training    {corpus.train_prefix} ({_size(corpus.train)})")
    print(f"validation  {corpus.valid_prefix} ({_size(corpus.valid)})")
    print(f"arguments   {shlex.join(corpus.megatron_arguments())}")
    return 0


def _size(part: PartCounts) -> str:
    return f"{part.documents:,} documents, {part.bytes / 1e6:.1f} MB, {part.tokens:,} tokens"


if __name__ == "__main__":
    sys.exit(main())
