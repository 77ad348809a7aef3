"""`status --watch` and `top` where there is no terminal, or no textual."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli import main


def test_on_a_pipe_each_table_follows_the_one_before_until_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpctrain", "status", "--watch", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == ""
    assert [line for line in lines if "no runs under" in line] == [lines[1], lines[4]]
    assert lines[2] == "\n"
    assert "\x1b" not in "".join(lines) + rest


@pytest.mark.parametrize("name", ["lr", "3_seeds", "2026-11-27_12-00-00", "./runs/x", "../other/x"])
def test_a_name_after_watch_is_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", "--watch", name]) == 2
    assert f"{name}: no such path, here or under runs/" in capsys.readouterr().err


def test_top_without_textual_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["top"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'hpctrain[top]'" in line
    assert "status --watch" in line


def test_top_without_a_terminal_imports_neither_textual_nor_torch(tmp_path: Path) -> None:
    program = "import sys\nfrom hpctrain.cli import main\ntry:\n    main(['top'])\nexcept SystemExit as end:\n    "
    program += "print(end.code, sorted({'textual', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert done.stdout == "2 []\n"
    assert "needs a terminal" in done.stderr
