# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/arguments.md and docs/optimizers.md from the contract of options and the optimizers.

python tools/document.py
"""

import argparse
from pathlib import Path

from megatron_async import platform
from megatron_async.files import write_atomically

_DOCS = Path(__file__).parents[1] / "docs"
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"


def pages() -> dict[Path, str]:
    """Each page with the tables of the code as it is."""
    from megatron_async.config.contract import explain
    from megatron_async.optim import listing

    return {
        path: _with_tables(path.read_text(encoding="utf-8"), tables)
        for path, tables in (
            (_DOCS / "arguments.md", explain.markdown()),
            (_DOCS / "optimizers.md", listing.markdown()),
        )
    }


def _with_tables(page: str, tables: str) -> str:
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n{tables}\n{_END}{after}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    platform.activate_or_exit("cpu")
    for path, page in pages().items():
        write_atomically(path, page)


if __name__ == "__main__":
    main()
