# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hidden warnings are in the installed Megatron or torch, and others are shown."""

import importlib.util
import logging
import warnings
from pathlib import Path

import pytest

from megatron_async.mcore.messages import MESSAGES, PYTHON_WARNINGS, hide


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.logger)
def test_a_hidden_warning_is_in_megatron(message, caplog):
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0], *message.logger.split(".")[2:]).with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    for part in message.text.split(" MockGPTDataset "):  # a class name that Megatron fills in
        assert part in source
    hide()
    logger = logging.getLogger(message.logger)
    logger.warning("%s ...", message.text)
    logger.warning("another")
    assert [record.getMessage() for record in caplog.records] == ["another"]


def test_hidden_warnings_of_python_are_in_torch():
    spec = importlib.util.find_spec("torch.distributed")
    assert spec is not None and spec.submodule_search_locations
    (folder,) = map(Path, spec.submodule_search_locations)
    files = [folder / "_shard" / "_utils.py", *(folder / "checkpoint").glob("*.py")]
    sources = "".join(file.read_text(encoding="utf-8") for file in files)
    assert PYTHON_WARNINGS and [text for text in PYTHON_WARNINGS if text not in sources] == []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        hide()
        for text in (*PYTHON_WARNINGS, "another"):
            warnings.warn(f"{text} ...", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["another ..."]
