# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Hidden warnings are in the installed Megatron, and others of the same loggers are shown."""

import importlib.util
import logging
from pathlib import Path

import pytest

from megatron_async.mcore.messages import MESSAGES, hide


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
