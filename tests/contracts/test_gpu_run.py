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
from fork_server import clean_environment

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
    assert "bash tests/gpu/run OUT [--device cuda|cpu] [--minutes 9] [--only PHASE,...] [--tiny]" in done.stderr
    process = start(tmp_path / "out", "--only", "smokes")
    assert "there is no phase smokes; the phases are machine, smoke, " in process.communicate(timeout=60)[0]
    assert process.returncode == 2


def test_ended_in_its_middle_it_prints_a_table_and_leaves_no_process(tmp_path):
    process = start(tmp_path / "out", "--only", "smoke,machine")
    next(line for line in process.stdout if line.startswith("smoke "))
    os.kill(process.pid, signal.SIGTERM)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in printed
    assert "2 results, 1 failed, 0 skipped" in (tmp_path / "out" / "table.txt").read_text()
    first, last = results(tmp_path / "out")
    assert first.keys() == FIELDS
    assert (first["phase"], first["ok"]) == ("smoke", True)
    assert last["ok"] is False
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


def test_a_phase_that_cannot_end_in_time_is_skipped(tmp_path):
    process = start(tmp_path / "out", "--only", "machine,core", "--minutes", "2.6")
    printed = process.communicate(timeout=120)[0]
    assert process.returncode == 0, printed
    (skipped,) = [result for result in results(tmp_path / "out") if result["detail"].startswith("skipped")]
    assert (skipped["name"], skipped["ok"]) == ("core", None)


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
