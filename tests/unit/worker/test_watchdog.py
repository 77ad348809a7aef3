from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.run.stacks import answer

PROGRAM = Path(__file__).parent / "programs" / "watched.py"
HANGING = {
    "hangs_after_a_step": "no step for 3 s (health.hang_timeout_s)",
    "hangs_before_the_first_step": "start-up and no first step for 3 s (health.start_timeout_s)",
    "hangs_where_the_file_system_does": "no step for 3 s (health.hang_timeout_s)",
    "hangs_in_the_second_part_of_the_start": "start-up and no first step for 3 s (health.start_timeout_s)",
    "hangs_in_a_save": "a save that didn't end for 3 s (health.save_timeout_s)",
    "hangs_after_an_evaluation": "no step for 3 s (health.hang_timeout_s)",
}
OTHERS = (
    "takes_its_time",
    "evaluates_batch_after_batch",
    "waits_its_turn",
    "has_nothing_to_say",
    "talks_for_ever",
    "keeps_the_lock",
    "forks",
    "is_suspended",
    "is_asked",
    "blocks_signals",
)
TIMER = re.compile(r"Timeout \([^)]*\)!\n(?:(?:Thread |  File |Current thread |Extension modules:)[^\n]*\n|\n)*")
"""What faulthandler's timer writes where the machine let a process stand still for as long as a hang takes here."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """All programs, which mostly wait, at the same time; what each left behind."""
    begun = {}
    for name in (*HANGING, *OTHERS):
        folder = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-u", PROGRAM, name, folder]
        begun[name] = folder, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    suspended = begun["is_suspended"][1]
    first = suspended.stdout.readline()
    suspended.send_signal(signal.SIGSTOP)
    time.sleep(6)
    suspended.send_signal(signal.SIGCONT)
    found = {}
    for name, (folder, process) in begun.items():
        out, err = process.communicate(timeout=60)
        file = folder / "stacks"
        said = err if name == "keeps_the_lock" else TIMER.sub("", err)
        found[name] = SimpleNamespace(code=process.returncode, out=out, err=said, file=file, stacks="")
        found[name].stacks = file.read_text() if file.exists() else ""
    found["is_suspended"].out = first + found["is_suspended"].out
    return found


@pytest.mark.parametrize(("name", "complaint"), HANGING.items())
def test_a_rank_that_hangs_leaves_its_stacks_and_ends(ended, name, complaint):
    left = ended[name]
    assert left.code == 1
    message, waits, stack = left.out.split("\n", 2)
    assert message == f"{complaint}; it was at stand in {PROGRAM}:{message.rpartition(':')[2]}"
    assert waits == "False"
    assert f"in {name}\n    stand(" in stack
    assert left.err == f"hpctrain: rank 3 of 4 on here hangs: {message}\n"
    assert re.search(rf"File .*watched.py\", line \d+ in stand\n.* in {name}\n", left.stacks)
    main = re.search(r"0x[0-9a-f]+(?= is MainThread)", left.stacks)[0]
    assert f"Thread {main} (most recent call first):\n" in left.stacks
    assert left.stacks.startswith("==== hang: rank 3 of 4 on here, 20")
    assert left.stacks.splitlines()[-1].startswith("==== end")


@pytest.mark.parametrize("name", ["takes_its_time", "evaluates_batch_after_batch", "waits_its_turn"])
def test_a_phase_may_take_its_own_time(ended, name):
    left = ended[name]
    assert (left.code, left.out, left.err, left.stacks) == (0, "the end\n", "", "")


def test_the_process_ends_even_if_the_last_words_fail(ended):
    left = ended["has_nothing_to_say"]
    assert left.code == 1
    assert left.err.endswith("LookupError: no words\n")
    assert "in stand" in left.stacks


def test_the_process_ends_even_if_the_last_words_never_do(ended):
    left = ended["talks_for_ever"]
    assert (left.code, left.out) == (1, "")
    assert "in stand" in left.stacks


def test_stacks_are_written_while_a_thread_keeps_pythons_lock(ended):
    left = ended["keeps_the_lock"]
    assert (left.code, left.out) == (0, "the end\n")
    assert left.err.startswith("Timeout (0:00:03)!\n")
    assert "in keeps_the_lock\n" in left.err


def test_a_forked_child_is_not_watched_and_can_exit(ended):
    left = ended["forks"]
    assert left.code == 1
    assert left.out.splitlines()[0] == "MainThread"
    assert "no step for 3 s" in left.out
    assert "in forks" in left.stacks


def test_a_suspended_process_did_not_hang(ended):
    left = ended["is_suspended"]
    assert (left.code, left.out, left.stacks) == (0, "ready\nthe end\n", "")


def test_stacks_that_are_asked_for_are_written_and_the_rank_goes_on(ended):
    left = ended["is_asked"]
    first, second, end = left.out.splitlines()
    assert (left.code, left.err, end) == (0, "", "the end")
    for token in (first, second):
        text = answer(left.file, token)
        assert text.startswith("==== stacks as asked: rank 3 of 4 on here, 20")
        assert "in is_asked\n" in text
    assert left.stacks.count("==== end") == 2


def test_signals_go_to_the_main_thread_alone(ended):
    assert ended["blocks_signals"].out == "unblocking\nhandled\nthe end\n"
