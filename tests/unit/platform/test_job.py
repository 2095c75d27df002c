# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The message about ranks without a GPU; that every rank ends with it is in tests/distributed/test_devices.py."""

from megatron_async.platform.job import _ranges, _sentence


def test_ranks_are_named_by_host():
    hosts = [None] * 8 + ["node-b"] * 4 + [None, "node-b", None, "node-c"]
    text = _sentence(hosts)
    assert text.startswith("6 of 16 ranks see no usable GPU (node-b: rank 8-11, 13; node-c: rank 15), the others do.")


def test_ranges():
    assert _ranges([3]) == "3"
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
