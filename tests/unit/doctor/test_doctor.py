# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The doctor's findings on hosts, GPUs and jobs that are imitated, and its exit status."""

import json
import socket
from types import SimpleNamespace

import pytest

from megatron_async.doctor import __main__ as doctor
from megatron_async.doctor import devices, host, job
from megatron_async.doctor.finding import Finding

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-55\t0
GPU1\tNV18\t X \tSYS\tPXB\t0-55\t0
GPU2\tSYS\tSYS\t X \tSYS\t56-111\t1
NIC0\tPIX\tPXB\tSYS\t X \t\t

Legend:
  X    = Self
"""


def test_kinds_of_links_are_read_from_the_matrix():
    assert devices.link_kinds(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}
    assert devices.link_kinds("") == {}


@pytest.fixture
def gpus(monkeypatch):
    """Imitate GPUs: their compute capability, and the pairs that do not reach each other's memory."""

    def pretend(count, capability=(9, 0), apart=(), driver="580.1"):
        cuda = SimpleNamespace(
            get_device_properties=lambda number: SimpleNamespace(
                name="Some GPU", major=capability[0], minor=capability[1]
            ),
            mem_get_info=lambda number: (79 * 2**30, 80 * 2**30),
            get_device_capability=lambda number: capability,
            can_device_access_peer=lambda a, b: (min(a, b), max(a, b)) not in apart,
        )
        monkeypatch.setattr(devices, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(devices, "_nvidia_smi", lambda *arguments: TOPOLOGY if "topo" in arguments else driver)
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        return lambda: {finding.check: finding for finding in devices.findings(count)}

    return pretend


def test_gpus_and_their_links(gpus):
    found = gpus(3)()
    assert found["GPU 2"].level == "OK" and "80 GiB" in found["GPU 2"].found
    assert found["links between GPUs"].found == "1 x NV18, 2 x SYS; 3 of 3 pairs reach each other's memory"
    found = gpus(3, apart={(0, 2)})()
    assert found["links between GPUs"].level == "WARN" and "pairs 0-2 send" in found["links between GPUs"].change


def test_a_gpu_without_bf16_and_a_driver_without_gpus(gpus):
    assert gpus(1, capability=(7, 0))()["GPU 0"].level == "WARN"
    assert gpus(0)()["GPUs"].level == "FAIL"
    assert gpus(0, driver="")()["GPUs"].level == "OK"


@pytest.mark.parametrize(
    ("value", "capability", "level"),
    [
        (None, (9, 0), "OK"),
        ("1", (10, 0), "WARN"),
        ("8", (10, 0), "WARN"),
        ("32", (9, 0), "WARN"),
        ("32", (10, 0), "OK"),
    ],
)
def test_number_of_hardware_queues(gpus, monkeypatch, value, capability, level):
    examine = gpus(1, capability=capability)
    if value:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert examine()["CUDA_DEVICE_MAX_CONNECTIONS"].level == level


def test_a_port_in_use_is_found_unless_the_job_uses_it():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        number = other.getsockname()[1]
        assert host.port(str(number), in_job=False).level == "WARN"
        assert host.port(str(number), in_job=True).level == "OK"
    assert host.port(str(number), in_job=False).level == "OK"
    assert {host.port(text, in_job=False).level for text in ("", "29500x", "-1", "0", "65536")} == {"FAIL"}


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    assert host.writable("x", tmp_path / "new" / "folder", "").level != "FAIL"
    assert host.writable("x", tmp_path / "file" / "below", "give another").change == "give another"


def hosts(*offsets, torch=("2.13.0", "2.13.0"), ranks=((0, 1), (2, 3))):
    return [
        job.Host(f"host-{number}", (Finding("torch", "OK", torch[number]),), ranks[number], offset, 0.2)
        for number, offset in enumerate((0.0, *offsets))
    ]


@pytest.mark.parametrize(("offset", "level"), [(0.1, "OK"), (-0.6, "OK"), (0.8, "WARN"), (-3.0, "WARN")])
def test_clocks_are_compared_within_their_uncertainty(offset, level):
    (clock,) = [finding for finding in job.findings(hosts(offset)) if finding.check == "clock of host-1"]
    assert clock.level == level and f"{offset:+.3f} s against host-0" in clock.found


def test_hosts_must_be_alike():
    found = {finding.check: finding for finding in job.findings(hosts(0.0))}
    assert {finding.level for finding in found.values()} == {"OK"}
    found = {f.check: f for f in job.findings(hosts(0.0, torch=("2.13.0", "2.12.0"), ranks=((0, 1), (2,))))}
    assert found["torch of host-1"].level == "FAIL" and "on host-0: 2.13.0" in found["torch of host-1"].found
    assert found["ranks of each host"].level == "WARN"


@pytest.mark.parametrize(("level", "status"), [("OK", 0), ("WARN", 0), ("FAIL", 1)])
def test_exit_status_and_json(monkeypatch, capsys, level, status):
    finding = Finding("disk", level, "[full]", "make room")
    monkeypatch.setattr(doctor, "examine", lambda: [job.Host("here", (finding,))])
    assert doctor.main(["--json"]) == status
    assert json.loads(capsys.readouterr().out) == {
        "here": [{"check": "disk", "level": level, "found": "[full]", "change": "make room"}]
    }
    assert doctor.main([]) == status
    assert "[full]" in capsys.readouterr().out


def test_this_machine_is_examined_in_full():
    (here,) = doctor.examine()
    checks = {finding.check for finding in here.findings}
    assert {"python", "torch", "megatron-core", "emerging-optimizers", "transformer-engine", "apex"} < checks
    assert {"shared memory", "open files", "locked memory", "folder runs/", "CUDA_DEVICE_MAX_CONNECTIONS"} < checks
    assert all(finding.change for finding in here.findings if finding.level != "OK")
