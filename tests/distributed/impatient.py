# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The entry point with a time limit of seconds once the ranks have met; the command line gives whole minutes."""

import sys
from datetime import timedelta
from typing import Any

from megatron_async import platform
from megatron_async.pretrain import run_to_exit

SECONDS = 10.0


def shorten_the_limit() -> None:
    platform.activate("cpu")
    from megatron_async.mcore import parallel
    from megatron_async.platform import groups

    initialize = parallel.initialize

    def and_shorten(args: Any) -> None:
        initialize(args)
        args.distributed_timeout_minutes = SECONDS / 60

    parallel.initialize = and_shorten
    groups.timeout = lambda: timedelta(seconds=SECONDS)


if __name__ == "__main__":
    shorten_the_limit()
    run_to_exit(sys.argv[1:])
