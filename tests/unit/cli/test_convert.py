# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""`megatron-async convert` says what stands in the way, without a traceback."""

import pytest

from megatron_async.cli import convert


@pytest.mark.parametrize("error", [ValueError("no counterpart"), OSError(28, "No space left on device")])
def test_what_stands_in_the_way_is_named(monkeypatch, capsys, tmp_path, error):
    def fail(options):
        raise error

    monkeypatch.setitem(convert._WAYS, "to-hf", (fail, ""))
    assert convert.main(["to-hf", "--load", str(tmp_path), "--save", str(tmp_path / "hf")]) == 2
    said = capsys.readouterr().err
    assert "nothing was converted" in said and str(error) in said
