"""`bash tests/gpu/run`, which has minutes on a GPU, must not be what fails there: here it runs on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.fork_server import clean_environment

TESTS = Path(__file__).parents[1]
FIELDS = {"phase", "name", "value", "unit", "ok", "detail", "seconds"}


def start(out, *options):
    return subprocess.Popen(
        ["bash", TESTS / "gpu" / "run", out, "--device", "cpu", "--tiny", *options],
        env=clean_environment() | {"PYTHON": sys.executable, "PYTHONWARNINGS": "default"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def results(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_it_says_what_its_arguments_are(tmp_path):
    done = subprocess.run(["bash", TESTS / "gpu" / "run"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "bash tests/gpu/run OUT [--device cuda|cpu] [--minutes 13.5] [--only PHASE,...] [--tiny]" in done.stderr
    assert "expected the folder OUT as the first argument, got ''; type: bash tests/gpu/run OUT" in done.stderr
    process = start(tmp_path / "out", "--only", "smokes")
    assert "there is no phase smokes; the phases are machine, smoke, " in process.communicate(timeout=60)[0]
    assert process.returncode == 2


def test_ended_in_its_middle_it_prints_a_table_and_leaves_no_process(tmp_path):
    process = start(tmp_path / "out", "--only", "core,machine,smoke", "--minutes", "2.6")
    next(line for line in process.stdout if line.startswith("machine: "))
    time.sleep(0.5)  # the next phase begins
    os.kill(process.pid, signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM
    skipped, *measured, ended = results(tmp_path / "out")
    assert skipped.keys() == FIELDS
    assert (skipped["phase"], skipped["ok"]) == ("core", None)
    assert skipped["detail"].startswith("skipped: it may take 210 s, and 15")
    assert (measured[-1]["phase"], measured[-1]["name"], measured[-1]["ok"]) == ("machine", "measured", True)
    assert (ended["phase"], ended["detail"], ended["ok"]) == ("smoke", "ended by SIGTERM", False)
    table = (tmp_path / "out" / "table.txt").read_text()
    assert table.strip() in printed
    assert f"{len(measured) + 2} results, 1 failed, 1 skipped" in table
    deadline = time.monotonic() + 30
    while is_there(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_there(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_every_phase_passes_on_a_cpu(tmp_path):
    process = start(tmp_path / "out", "--minutes", "15")
    printed = process.communicate(timeout=950)[0]
    assert process.returncode == 0, printed
    found = results(tmp_path / "out")
    assert {result["phase"] for result in found} == {
        *("machine", "smoke", "core", "gpt2", "saves", "exactness", "models", "rest")
    }
    assert (tmp_path / "out" / "table.txt").read_text().strip() in printed
    files = list((tmp_path / "out").iterdir())
    assert len(files) <= 8
    assert all(file.stat().st_size < 16_000_000 for file in files)
