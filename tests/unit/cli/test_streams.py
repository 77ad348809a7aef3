"""Commands whose output is closed, has no reader, or takes only ASCII: no traceback, and the exit code is right."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys

import pytest

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.launch.prepare import prepare

STREAMS = {
    "closed": ("{}", ">&-", 0),
    "all closed": ("{}", "<&- >&- 2>&-", 0),
    "no reader": ("{}", "| true; exit ${{PIPESTATUS[0]}}", 0),
    "no reader of errors": ("{}", "|& true; exit ${{PIPESTATUS[0]}}", 0),
    "full": ("{}", "> /dev/full", 1),
    "ASCII": ("PYTHONIOENCODING=ascii LC_ALL=C {}", "", 0),
}
COMMANDS = (
    "inspect Grün",
    "logs Grün",
    "cancel Grün",
    "env",
    "--help",
    "--cfg job",
    "resume Grün cluster.dry_run=true",
    "run_dir=neu trainer.max_steps=2",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Composer().compose(["trainer.max_steps=2"])
    config.run_dir = "runs/Grün"
    directory = prepare(config, []).directory
    directory.rank_log(0).write_text("Grün\n" * 20_000)
    record = {"event": "start", "attempt": 1, "nodes": ["n\udcff1"], "world_size": 1, "step": 0, "time": 1.0}
    directory.attempts.write_text(json.dumps(record) + "\n")
    return tmp_path


def run(words, case):
    before, after, code = STREAMS[case]
    typed = f"{before.format(f'{shlex.quote(sys.executable)} -m hpctrain {words}')} {after.format()}"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, timeout=120, check=False)
    for text in (done.stdout, done.stderr):
        assert b"Traceback" not in text, text.decode(errors="replace")
        assert b"Exception ignored" not in text, text.decode(errors="replace")
    return done, code


@pytest.mark.parametrize("case", STREAMS)
def test_status(folder, case):
    done, code = run("status Grün", case)
    assert done.returncode == code, done.stderr
    if case == "full":
        assert done.stderr == b"hpctrain: error: No space left on device\n"
    if case == "ASCII":
        assert b"runs/Gr\\xfcn\n" in done.stdout


def test_what_was_printed_before_an_error_of_the_file_system_stays(tmp_path, monkeypatch, capsys):
    def submit(_arguments):
        print("submitted job 4711")
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a")

    monkeypatch.setattr("hpctrain.cli.env.main", submit)
    with (tmp_path / "out").open("w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert main(["env"]) == 1
    assert (tmp_path / "out").read_text() == "submitted job 4711\n"
    assert capsys.readouterr().err == "hpctrain: error: a: Permission denied\n"


def test_unbuffered_output_that_ignores_errors_stays_unbuffered():
    """Launched ranks have `-u`, so that their logs show at once what they print."""
    script = "import os; from hpctrain.streams import ignore_write_errors as i; i(); print('a'); os._exit(0)"
    done = subprocess.run([sys.executable, "-u", "-c", script], capture_output=True, check=True)
    assert done.stdout == b"a\n"


@pytest.mark.nightly
@pytest.mark.parametrize("case", STREAMS)
@pytest.mark.parametrize("words", COMMANDS)
def test_every_command(folder, words, case):
    done, code = run(words, case)
    trains = words.startswith("run_dir")
    expected = 0 if trains or (words.startswith("cancel") and case != "full") else code
    assert done.returncode == expected, done.stderr
    if trains:
        assert '"completed"' in (folder / "neu" / "attempts.jsonl").read_text()
