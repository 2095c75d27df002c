# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/optimizers.md from the registered optimizers.

python tools/document_optimizers.py
"""

import argparse
from pathlib import Path

from megatron_async import platform
from megatron_async.files import write_atomically

DOCUMENT = Path(__file__).parents[1] / "docs" / "optimizers.md"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    platform.activate_or_exit("cpu")
    from megatron_async.optim import listing

    begin, end = listing.MARKERS
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end)
    write_atomically(DOCUMENT, f"{before}{begin}\n{listing.markdown()}\n{end}{after}")


if __name__ == "__main__":
    main()
