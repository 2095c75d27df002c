# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""What a tool does with wrong arguments."""

from collections.abc import Callable, Sequence

import pytest


def check_refused(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], arguments: list[str], messages: Sequence[str]
) -> None:
    """Exit status 2, every message on standard error without a traceback, nothing on standard output."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for message in messages:
        assert message in captured.err
    assert "Traceback" not in captured.err
