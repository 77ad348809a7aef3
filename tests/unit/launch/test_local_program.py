"""A program's run on this machine, from the command to its end: what is printed, recorded and left to resume."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger

TWO = "cluster.processes_per_node=2"
SAVES = """\
trap 'echo $HPCTRAIN_ATTEMPT > $HPCTRAIN_CHECKPOINT_DIR/saved_$RANK; exit 0' TERM
[ -e $HPCTRAIN_CHECKPOINT_DIR/saved_$RANK ] && exit 0
touch $HPCTRAIN_SUBMIT_DIR/there_$RANK
while true; do sleep 0.02; done
"""
IGNORES = "trap '' TERM\ntouch $HPCTRAIN_SUBMIT_DIR/there_$RANK\nwhile true; do sleep 0.02; done\n"


@pytest.fixture
def run(folder):
    """Types `run` with a shell script in an empty folder; returns the exit code."""

    def typed(script, *words):
        return main(["run", "run_dir=run", "code.snapshot=none", *words, "--", "sh", "-c", script])

    return typed


@pytest.fixture
def interrupt(folder):
    """Presses Ctrl-C so many times once both ranks are there."""
    threads = []

    def start(times):
        def press():
            deadline = time.monotonic() + 30
            while not all((folder / f"there_{rank}").exists() for rank in range(2)) and time.monotonic() < deadline:
                time.sleep(0.01)
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)

        threads.append(threading.Thread(target=press))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def reasons():
    return [str(one.reason) for one in Ledger(RunDirectory.at("run")).attempts()]


def test_a_rank_that_fails_is_named_with_its_code_and_its_last_line(run, capsys):
    assert run("echo starting; [ $RANK = 0 ] || { echo no data >&2; exit 7; }", TWO) == 1
    err = capsys.readouterr().err
    assert "hpctrain: failed: rank 1 on " in err
    assert ": exit code 7: no data\n" in err
    assert "after step" not in err
    assert "once the cause is fixed, resume with: python -m hpctrain resume " in err
    assert reasons() == ["failed"]


def test_what_rank_zero_printed_is_not_printed_again(run, capsys):
    script = "printf 'Traceback (most recent call last):\\n  File \"x.py\", line 1\\nValueError: no\\n' >&2; exit 1"
    assert run(script) == 1
    captured = capsys.readouterr()
    first, _advice = captured.err.splitlines()
    assert first.endswith("exit code 1: ValueError: no")
    assert captured.out.count("\nTraceback") == 1


def test_ranks_may_end_at_different_times(run, monkeypatch):
    monkeypatch.setattr("hpctrain.launch.local.STOPPING_S", 0.0)
    assert run("[ $RANK = 0 ] || sleep 0.5", TWO) == 0
    assert reasons() == ["completed"]


def test_ctrl_c_stops_it_and_a_resume_continues(run, interrupt, capsys):
    interrupt(1)
    assert run(SAVES, TWO) == 4
    assert "hpctrain: stopped\nto resume: python -m hpctrain resume " in capsys.readouterr().err
    assert [Path(f"run/checkpoints/saved_{rank}").read_text() for rank in range(2)] == ["1\n", "1\n"]
    assert main(["resume", "run"]) == 0
    assert reasons() == ["interrupted", "completed"]


def test_ctrl_c_twice_kills_what_does_not_stop(run, interrupt, capsys):
    interrupt(2)
    assert run(IGNORES, TWO) == 4
    assert "ended at once by a second Ctrl-C, without a save" in capsys.readouterr().err
    assert reasons() == ["interrupted"]


def test_runs_of_a_sweep_do_not_see_what_the_others_wrote(folder, capsys):
    (folder / "outputs").mkdir()
    (folder / "outputs" / "last").write_text("by hand")
    script = "ls outputs; mkdir -p outputs new; echo x > outputs/last; touch new/last; echo runs in $PWD"
    assert main(["run", "-m", "run_dir=sweep", "args.n=1,2", "--", "sh", "-c", f"{script} # {{args.n}}"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "last" not in printed
    places = [Path(line.removeprefix("runs in ")) for line in printed if line.startswith("runs in ")]
    for number, place in enumerate(places):
        assert place.parent == folder / "sweep" / str(number) / "code"
        line = f"hpctrain: the program wrote into {place}, the run's own copy of the code: new, outputs"
        assert any(printed_line.endswith(line) for printed_line in printed)
    assert (folder / "outputs" / "last").read_text() == "by hand"
