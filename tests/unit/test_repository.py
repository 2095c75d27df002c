# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The repository itself: set-up, pinned versions, licence lines, paths in the README, the SLURM scripts."""

import ast
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import megatron_async

ROOT = Path(__file__).resolve().parents[2]
LICENCE = "# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0"
GENERATED = {".git", ".venv", "runs", "build", "dist", "shared", "__pycache__"}
SBATCH = ROOT / "examples" / "slurm" / "pretrain.sbatch"


def repository_files() -> list[Path]:
    """Every file that a person wrote."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in GENERATED and not name.endswith("_cache")]
        found += [Path(folder) / name for name in names]
    return found


def load_script(path: Path) -> ModuleType:
    """Imports a script that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_command(folder: Path, name: str, body: str) -> Path:
    """A fake command for PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


# find_python.sh


def find_python(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with nothing but `tmp_path/bin` on PATH."""
    variables = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), **environment}
    return subprocess.run(
        ["/bin/bash", ROOT / "tools" / "find_python.sh"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=30,
    )


def fake_python(folder: Path, name: str, minor: int, path: str) -> None:
    """An interpreter 3.`minor` that answers the script's probe as a real one would."""
    answer = f"echo {minor} {path}" if minor >= 12 else "exit 1"
    write_command(folder, name, answer)


SHIM_THAT_FAILS = "echo 'pyenv: python3.12: command not found' >&2; exit 127"


def test_find_python_takes_a_real_interpreter(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "python3", f'exec "{sys.executable}" "$@"')
    found = find_python(tmp_path)
    assert found.returncode == 0, found.stderr
    asked = subprocess.run(
        [found.stdout.strip(), "-c", "import sys; print(sys.version_info >= (3, 12))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == "True"


def test_find_python_passes_over_a_shim_that_fails_and_an_old_interpreter(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "python3.12", SHIM_THAT_FAILS)
    fake_python(tmp_path / "bin", "python3", 11, "/never")
    fake_python(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin", "python", 12, "/the/pyenv/one")
    assert find_python(tmp_path).stdout.strip() == "/the/pyenv/one"


def test_find_python_looks_in_pyenv_root(tmp_path: Path) -> None:
    fake_python(tmp_path / "pyenv" / "versions" / "3.13.0" / "bin", "python", 13, "/from/root")
    assert find_python(tmp_path, PYENV_ROOT=str(tmp_path / "pyenv")).stdout.strip() == "/from/root"


def test_find_python_prefers_the_tested_version(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3.14", 14, "/fourteen")
    fake_python(tmp_path / "bin", "python3.13", 13, "/thirteen")
    fake_python(tmp_path / "home" / ".pyenv" / "versions" / "3.12.9" / "bin", "python", 12, "/twelve")
    assert find_python(tmp_path).stdout.strip() == "/twelve"


def test_find_python_tries_every_folder_of_path(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "python3.12", SHIM_THAT_FAILS)
    fake_python(tmp_path / "second", "python3.12", 12, "/second")
    found = find_python(tmp_path, PATH=f"{tmp_path / 'bin'}:{tmp_path / 'second'}")
    assert found.stdout.strip() == "/second"


def test_find_python_without_any_says_what_to_install(tmp_path: Path) -> None:
    write_command(tmp_path / "bin", "cat", 'exec /bin/cat "$@"')
    fake_python(tmp_path / "bin", "python3", 11, "/never")
    found = find_python(tmp_path)
    assert found.returncode == 2
    assert found.stdout == ""
    assert "apt install python3.12 python3.12-venv" in found.stderr
    assert "PYTHON=" in found.stderr


def test_find_python_honours_python_and_does_not_replace_a_wrong_one(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", "python3.12", 12, "/found/by/search")
    fake_python(tmp_path / "own", "mine", 13, "/own/mine")
    fake_python(tmp_path / "own", "old", 11, "/own/old")
    assert find_python(tmp_path, PYTHON=str(tmp_path / "own" / "mine")).stdout.strip() == "/own/mine"
    refused = find_python(tmp_path, PYTHON=str(tmp_path / "own" / "old"))
    assert refused.returncode == 2
    assert str(tmp_path / "own" / "old") in refused.stderr


# make setup


FAKE_INTERPRETER = """#!/bin/sh
log=LOG
case "$*" in
    -c*) echo 12 "$0" ;;
    "-m venv --clear .venv")
        echo venv >>"$log"
        rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip --version") ;;
    "-m pip install "*) echo install >>"$log"; exit "${PIP_STATUS:-0}" ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture
def bare_copy(tmp_path: Path) -> Path:
    """What set-up reads, in a folder of its own, and an interpreter that installs nothing."""
    copy = tmp_path / "copy"
    (copy / "tools").mkdir(parents=True)
    for name in ("Makefile", "setup.py", "constraints.txt", "pyproject.toml", "tools/find_python.sh"):
        shutil.copy(ROOT / name, copy / name)
    interpreter = tmp_path / "interpreter"
    interpreter.write_text(FAKE_INTERPRETER.replace("LOG", str(tmp_path / "log")), encoding="utf-8")
    interpreter.chmod(0o755)
    return copy


def make_setup(copy: Path, **environment: str) -> tuple[int, list[str]]:
    """Exit status, and what the interpreter was asked to do."""
    log = copy.parent / "log"
    log.write_text("", encoding="utf-8")
    variables = {"PATH": "/usr/bin:/bin", "PYTHON": str(copy.parent / "interpreter"), **environment}
    done = subprocess.run(["make", "setup"], cwd=copy, env=variables, capture_output=True, text=True, timeout=30)
    return done.returncode, log.read_text(encoding="utf-8").split()


def test_set_up_runs_once(bare_copy: Path) -> None:
    assert make_setup(bare_copy) == (0, ["venv", "install"])
    assert make_setup(bare_copy) == (0, [])


def test_changed_requirements_are_installed_into_the_same_environment(bare_copy: Path) -> None:
    make_setup(bare_copy)
    later = time.time() + 10
    os.utime(bare_copy / "constraints.txt", (later, later))
    assert make_setup(bare_copy) == (0, ["install"])


def test_a_set_up_that_was_cut_off_starts_afresh(bare_copy: Path) -> None:
    status, asked = make_setup(bare_copy, PIP_STATUS="1")
    assert status != 0
    assert asked == ["venv", "install"]
    assert make_setup(bare_copy) == (0, ["venv", "install"])
    assert make_setup(bare_copy) == (0, [])


def test_set_up_without_an_interpreter_fails_before_it_makes_anything(bare_copy: Path) -> None:
    status, asked = make_setup(bare_copy, PYTHON="/no/such/python")
    assert (status, asked) == (2, [])
    assert not (bare_copy / ".venv").exists()


# versions and licence


def install_requires() -> list[Requirement]:
    """The requirements in setup.py, with those of the dev extra."""
    call = next(
        node
        for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setup"
    )
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    texts = ast.literal_eval(keywords["install_requires"]) + ast.literal_eval(keywords["extras_require"])["dev"]
    return [Requirement(text) for text in texts]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s@/]+", pin) for pin in pins), "only exact pins from the index"
    return {canonicalize_name(name): pinned for name, pinned in (pin.split("==") for pin in pins)}


def test_constraints_pin_every_direct_requirement_within_its_range() -> None:
    pins = constraints()
    requirements = install_requires()
    assert len(requirements) > 10
    for requirement in requirements:
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement} has no pin in constraints.txt"
        assert Version(pinned) in requirement.specifier, f"{requirement} excludes the pinned {pinned}"


def test_constraints_leave_torchs_own_pins_to_torch() -> None:
    assert [name for name in constraints() if name.startswith(("nvidia-", "cuda-")) or name == "triton"] == []


def test_version_is_a_version() -> None:
    assert str(Version(megatron_async.__version__)) == megatron_async.__version__


def test_every_source_file_starts_with_the_licence_line() -> None:
    names = {"Makefile", "Dockerfile", "run", "constraints.txt", "pyproject.toml"}
    sources = [
        path
        for path in repository_files()
        if path.suffix in {".py", ".sh", ".sbatch"} or (path.name in names and path.parent.name != "hooks")
    ]
    assert ROOT / "megatron_async" / "__init__.py" in sources
    missing = [
        str(path.relative_to(ROOT))
        for path in sources
        if path.stat().st_size > 0 and LICENCE not in path.read_text(encoding="utf-8").splitlines()[:2]
    ]
    assert missing == []


# README


def tree_paths() -> list[str]:
    """Paths of the README's tree: indented lines of a path and a description, nested by indentation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## What is here", 1)[1].split("\n## ", 1)[0]
    paths: list[str] = []
    parents: dict[int, str] = {}
    for line in section.splitlines():
        if not line.startswith("    "):
            continue
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        parent = parents.get(indent - 4, "")
        paths.append(parent + name)
        parents[indent] = paths[-1]
    return paths


def test_paths_in_the_readme_exist() -> None:
    paths = tree_paths()
    assert len(paths) > 10
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths += [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"quickstart", "test"} <= named <= targets


# SLURM


def slurm(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the job script with faked scheduler commands that log their calls to `tmp_path/calls`."""
    calls = tmp_path / "calls"
    write_command(
        tmp_path / "bin",
        "scontrol",
        f'echo "scontrol $*" >>"{calls}"\n'
        '[ "$1" = show ] || exit 0\n'
        'case $3 in "node[01-02]") printf "node01\\nnode02\\n" ;; node01) echo node01 ;; *) exit 1 ;; esac',
    )
    write_command(tmp_path / "bin", "srun", f'echo "srun $*" >>"{calls}"\nexit "${{SRUN_STATUS:-0}}"')
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node01",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    return subprocess.run(
        ["/bin/bash", SBATCH, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )


def dry_run(tmp_path: Path, **variables: str) -> dict[str, str]:
    done = slurm(tmp_path, "--lr", "1e-3", "--save", "a folder", DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def test_slurm_script_is_valid_bash() -> None:
    subprocess.run(["/bin/bash", "-n", SBATCH], check=True)


def test_slurm_dry_run_of_two_nodes(tmp_path: Path) -> None:
    shown = dry_run(tmp_path, SLURM_JOB_NODELIST="node[01-02]", SLURM_NNODES="2")
    assert shown["address"] == "node01"
    assert shown["nodes"] == "2"
    assert shown["world size"] == "16"
    assert f"--master-addr node01 --master-port {shown['port']}" in shown["command"]
    assert "--nnodes 2 --nproc-per-node 8" in shown["command"]
    assert shown["command"].endswith(
        "-m megatron_async.pretrain --exit-signal-handler --exit-signal SIGUSR1 --lr 1e-3 --save a\\ folder"
    )
    assert not any(call.startswith("srun") for call in calls(tmp_path))


def test_slurm_dry_run_of_one_node_with_processes_set(tmp_path: Path) -> None:
    shown = dry_run(tmp_path, PROCESSES_PER_NODE="3")
    assert (shown["address"], shown["world size"]) == ("node01", "3")


def test_slurm_ports_differ_between_jobs_and_avoid_ephemeral_ones(tmp_path: Path) -> None:
    ports = [int(dry_run(tmp_path, SLURM_JOB_ID=job)["port"]) for job in ("1", "2", "11999", "98765432")]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 32000 for port in ports)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"SLURM_JOB_NODELIST": "nonsense"}, "could not expand nonsense"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_NNODES": "2"}, "names 1 hosts for node01, but SLURM_NNODES is 2"),
        ({"SLURM_GPUS_ON_NODE": ""}, "PROCESSES_PER_NODE"),
        ({"PROCESSES_PER_NODE": "0"}, "'0'"),
        ({"SLURM_SUBMIT_DIR": "/"}, "submit from the repository's root"),
    ],
)
def test_slurm_script_refuses_what_it_cannot_resolve(tmp_path: Path, variables: dict[str, str], complaint: str) -> None:
    done = slurm(tmp_path, "--lr", "1e-3", **variables)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "localhost" not in done.stdout + done.stderr
    assert not any(call.startswith("srun") for call in calls(tmp_path))


def test_slurm_script_without_the_host_tool_fails_at_once(tmp_path: Path) -> None:
    write_command(tmp_path / "tools", "srun", f"echo called >{tmp_path / 'calls'}")
    done = slurm(tmp_path, "--lr", "1e-3", PATH=str(tmp_path / "tools"))
    assert done.returncode == 2
    assert "scontrol is not on PATH" in done.stderr
    assert calls(tmp_path) == []


@pytest.mark.parametrize(("status", "requeued"), [(0, False), (1, False), (137, False), (85, True)])
def test_slurm_requeues_on_the_documented_status_only(tmp_path: Path, status: int, requeued: bool) -> None:
    done = slurm(tmp_path, "--save", "c", "--load=c", SRUN_STATUS=str(status))
    assert done.returncode == (0 if requeued else status), done.stderr
    assert ("scontrol requeue 1234567" in calls(tmp_path)) is requeued


@pytest.mark.parametrize(
    ("arguments", "variables", "complaint"),
    [
        (("--load", "c"), {}, "--save is not among"),
        (("--save", "c"), {}, "--load is not among"),
        (("--save", "c", "--load", "c"), {"SLURM_RESTART_COUNT": "50"}, "restarted 50 times"),
    ],
)
def test_slurm_does_not_requeue_a_run_that_would_not_get_on(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], complaint: str
) -> None:
    done = slurm(tmp_path, *arguments, SRUN_STATUS="85", **variables)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "scontrol requeue 1234567" not in calls(tmp_path)


def test_slurm_readme_names_the_requeue_status_and_settings() -> None:
    script = SBATCH.read_text(encoding="utf-8")
    readme = (SBATCH.parent / "README.md").read_text(encoding="utf-8")
    settings = re.findall(r"\$\{(REQUEUE_STATUS|MAX_RESTARTS):-(\d+)\}", script)
    assert len(settings) == 2
    for name, default in settings:
        assert f"| `{name}` | {default} |" in readme


# launch.py


WORKER = """
import os, pathlib, signal, sys, time
def leave(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text("saved")
    while len(list(pathlib.Path(sys.argv[1]).glob("[01]"))) < 2:
        time.sleep(0.05)
    sys.exit(85)
signal.signal(signal.SIGUSR1, leave)
pathlib.Path(sys.argv[1], "ready" + os.environ["RANK"]).touch()
time.sleep(60)
"""


launch = load_script(ROOT / "examples" / "slurm" / "launch.py")


def launcher(*arguments: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(ROOT / "examples" / "slurm" / "launch.py")
    return [sys.executable, script, "--nproc-per-node", "2", "--master-port", str(port), *arguments]


@pytest.mark.parametrize(
    ("failures", "status"),
    [
        ([(5, 85)], 85),
        ([(5, -15), (5, 85)], 85),
        ([(4, -9), (5, 85)], 137),
        ([(6, 1), (5, 85), (6, -15)], 85),
        ([(5, -15)], 143),
    ],
)
def test_launcher_reports_the_worker_that_ended_first(failures: list[tuple[int, int]], status: int) -> None:
    assert launch._status(failures) == status


@pytest.mark.distributed
def test_launcher_passes_the_signal_on_and_keeps_the_workers_status(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER, encoding="utf-8")
    process = subprocess.Popen(
        launcher("--master-addr", "127.0.0.1", str(worker), str(tmp_path)),
        env=os.environ | {"OMP_NUM_THREADS": "1", "SLURM_NODEID": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready*"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline, "the workers did not start"
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 85, errors
    assert sorted(path.name for path in tmp_path.glob("[01]")) == ["0", "1"]


@pytest.mark.distributed
def test_launcher_refuses_an_address_that_does_not_resolve() -> None:
    started = time.monotonic()
    done = subprocess.run(
        launcher("--master-addr", "no-such-host.invalid", "-m", "this"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "no-such-host.invalid does not resolve" in done.stderr
    assert time.monotonic() - started < 30
