# Copyright (c) 2026 the megatron_async authors. SPDX-License-Identifier: Apache-2.0
"""The console script: one table, modules imported when their command is called, arguments passed as given."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.cli import main as cli


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_there(command: str) -> None:
    module, _, function = cli.COMMANDS[command][0].partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert re.search(rf"^def {function}\(argv: ", source, re.MULTILINE)


def test_arguments_reach_a_command_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spy_command.py").write_text("def main(argv):\n    seen.append(argv)\n    return 7\n\nseen = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "spy", ("spy_command:main", ""))
    monkeypatch.setattr(sys, "argv", ["megatron-async", "spy", "--help", "--lr=1 2", "spy"])
    assert cli.main() == cli.main(["spy", "--help", "--lr=1 2", "spy"]) == 7
    assert sys.modules["spy_command"].seen == [["--help", "--lr=1 2", "spy"]] * 2
    assert sys.argv == ["megatron-async", "spy", "--help", "--lr=1 2", "spy"]


def test_help_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in cli.COMMANDS)
    assert cli.main([]) == 2
    assert cli.main(["pretrian"]) == 2
    assert "pretrian: no such command. Did you mean pretrain? There are quickstart," in capsys.readouterr().err
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"megatron-async \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_what_starts_no_run_imports_no_torch() -> None:
    code = (
        "import sys; from megatron_async import pretrain; from megatron_async.cli import plan; "
        "print(pretrain.main(['--explain', '--lr']), pretrain.main(['--model', 'list']), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 0 False"


def test_the_table_imports_nothing_that_takes_time() -> None:
    heavy = "import sys, megatron_async.cli.main; print({'torch', 'rich', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
