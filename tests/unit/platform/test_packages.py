# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""Optional packages of GPU machines, and what changes where they are missing. Which are installed is imitated."""

from argparse import Namespace
from importlib.metadata import PackageNotFoundError

import pytest

from megatron_async import platform
from megatron_async.platform import gpu, packages
from megatron_async.platform.packages import APEX, FLASH_LINEAR_ATTENTION, TRANSFORMER_ENGINE

ALL = {"transformer-engine": "2.10.0+1234abcd", "apex": None, "flash-linear-attention": "0.4.2", "mamba-ssm": "2.3.0"}
"""Versions; Apex does not state one. A package that is not named is not installed."""


@pytest.fixture
def install(monkeypatch):
    def pretend(versions):
        modules = {module for name in versions for module in packages_by_name[name].modules}
        packages_by_module = {module: object() for module in modules}

        def version(name):
            if versions[name] is None:
                raise PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(packages.importlib.util, "find_spec", packages_by_module.get)
        monkeypatch.setattr(packages, "version", version)

    packages_by_name = {package.name: package for package in packages.OPTIONAL}
    return pretend


def test_nothing_is_said_where_all_are_there(install):
    install(ALL)
    assert packages.messages() == []
    assert (APEX.version, TRANSFORMER_ENGINE.version) == ("unknown", "2.10.0+1234abcd")


def test_each_missing_package_has_a_line_with_what_is_off(install):
    install({})
    lines = packages.messages()
    assert [line.split()[0] for line in lines] == [package.name for package in packages.OPTIONAL]
    assert all("is not installed; off: " in line for line in lines)
    assert "LM head" in lines[1]


def test_a_version_that_does_not_fit_counts_as_missing_and_is_named(install):
    install(ALL | {"transformer-engine": "2.5.0", "flash-linear-attention": "0.5.0"})
    assert [line.partition(";")[0] for line in packages.messages()] == [
        "transformer-engine 2.5.0, but >=2.6 is needed",
        "flash-linear-attention 0.5.0, but >=0.4,<0.5 is needed",
    ]
    assert not FLASH_LINEAR_ATTENTION.usable


@pytest.mark.parametrize(
    ("implementation", "there", "fused", "rope"),
    [
        ("local", [], False, False),
        ("local", ["apex"], True, False),
        ("local", ["transformer-engine"], False, True),
        ("transformer_engine", ["transformer-engine"], True, True),
    ],
)
def test_fused_kernels_of_local_layers_need_their_package(install, implementation, there, fused, rope):
    install({name: ALL[name] for name in there})
    args = Namespace(
        transformer_impl=implementation,
        pipeline_schedule="1f1b",
        gradient_accumulation_fusion=True,
        masked_softmax_fusion=True,
        persist_layer_norm=True,
        no_persist_layer_norm=False,
        apply_rope_fusion=True,
    )
    gpu.adjust(args)
    assert args.gradient_accumulation_fusion == args.masked_softmax_fusion == args.persist_layer_norm == fused
    assert args.no_persist_layer_norm != fused and args.apply_rope_fusion == rope


def test_a_run_that_needs_a_missing_package_is_refused_with_both_ways_out(install):
    platform.activate("cpu")
    from megatron_async.models import rules

    install({})
    args = Namespace(
        transformer_impl="transformer_engine",
        experimental_attention_variant="gated_delta_net",
        deterministic_mode=False,
        hybrid_layer_pattern="M*",
    )
    engine, delta_net, mamba = rules._optional_packages(args)
    assert "transformer-engine is not installed" in engine and "--transformer-impl local" in engine
    assert "pip install 'flash-linear-attention>=0.4,<0.5'" in delta_net and "--deterministic-mode" in delta_net
    assert "mamba-ssm is not installed" in mamba and "--deterministic-mode" in mamba
    install(ALL)
    assert list(rules._optional_packages(args)) == []


@pytest.mark.parametrize(("schedule", "groups"), [("1f1b", []), ("2bw", ["tp"])])
def test_tensor_parallel_streams_of_delayed_schedules_have_priority(schedule, groups):
    args = Namespace(transformer_impl="", pipeline_schedule=schedule, high_priority_stream_groups=[])
    gpu.adjust(args)
    assert args.high_priority_stream_groups == groups


@pytest.mark.parametrize(
    ("set_before", "one_queue", "connections"), [(None, False, "32"), (None, True, "1"), ("8", True, "8")]
)
def test_what_cuda_reads_at_its_start(monkeypatch, set_before, one_queue, connections):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if set_before:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", set_before)
    gpu.set_environment(one_queue=one_queue)
    assert gpu.os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == connections
    assert gpu.os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)


@pytest.mark.parametrize(
    ("save", "metrics", "below"),
    [("saves", "logs/m.jsonl", "saves"), (None, "logs/m.jsonl", "logs"), (None, None, "runs")],
)
def test_the_flight_recorder_writes_to_the_folder_of_the_run(tmp_path, monkeypatch, save, metrics, below):
    monkeypatch.chdir(tmp_path)
    args = Namespace(save=save, metrics_file=metrics, flight_recorder_dump_path=None)
    gpu.record_flights(args)
    assert args.flight_recorder_dump_path == f"{below}/flight_recorder"
    assert (tmp_path / below / "flight_recorder").is_dir()


@pytest.mark.parametrize("variable", [None, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
def test_what_the_user_has_set_for_the_flight_recorder_stays(tmp_path, monkeypatch, variable):
    monkeypatch.chdir(tmp_path)
    given = None if variable else "mine"
    if variable:
        monkeypatch.setenv(variable, "/elsewhere/rank_")
    args = Namespace(save="saves", metrics_file=None, flight_recorder_dump_path=given)
    gpu.record_flights(args)
    assert args.flight_recorder_dump_path == given and not (tmp_path / "saves").exists()


def test_a_folder_that_cannot_be_made_ends_no_run(tmp_path, monkeypatch):
    (tmp_path / "saves").write_text("a file")
    args = Namespace(save=str(tmp_path / "saves"), metrics_file=None, flight_recorder_dump_path=None)
    gpu.record_flights(args)
    assert args.flight_recorder_dump_path is None
