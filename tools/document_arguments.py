# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/arguments.md from the contract of options.

python tools/document_arguments.py
"""

import argparse
from pathlib import Path

from megatron_async.config.contract import explain
from megatron_async.files import write_atomically

DOCUMENT = Path(__file__).parents[1] / "docs" / "arguments.md"
MARKERS = "<!-- tables: begin -->", "<!-- tables: end -->"


def page() -> str:
    """The page with the tables of the contract as it is."""
    begin, end = MARKERS
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{explain.markdown()}\n{end}{after}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_atomically(DOCUMENT, page())
