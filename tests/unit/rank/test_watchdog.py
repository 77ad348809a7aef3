from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.attempt.hang import HangWatch, Phase
from hpctrain.config.health import Health
from hpctrain.errors import ConfigError
from hpctrain.run.stacks import answer
from hpctrain.run.times import SPENT, STARTING

PROGRAM = Path(__file__).parent / "programs" / "watched.py"
HANGING = {
    "hangs_after_a_step": "no step for 3 s (health.hang_timeout_s)",
    "hangs_before_the_first_step": "no first step within 3 s of start-up (health.start_timeout_s)",
    "hangs_where_the_file_system_does": "no step for 3 s (health.hang_timeout_s)",
    "hangs_in_the_second_part_of_the_start": "no first step within 3 s of start-up (health.start_timeout_s)",
    "hangs_in_a_save": "a save unfinished after 3 s (health.save_timeout_s)",
    "hangs_after_an_evaluation": "no step for 3 s (health.hang_timeout_s)",
}
OTHERS = (
    "hangs_in_a_program",
    "takes_its_time",
    "evaluates_batch_after_batch",
    "waits_its_turn",
    "fails_to_record_it",
    "records_it_for_ever",
    "keeps_the_lock",
    "forks",
    "is_suspended",
    "is_asked",
    "blocks_signals",
    "is_cancelled",
    "loses_a_peer",
    "loses_a_peer_and_raises",
    "loses_a_peer_and_takes_its_time_to_raise",
    "loses_a_peer_in_a_program",
)
TIMER = re.compile(r"Stack \(most recent call first\):\n(?:  [^\n]*\n)*")
"""What the timer writes where the machine let a process stand still for as long as a hang takes here."""


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
        output = err if name == "keeps_the_lock" else TIMER.sub("", err)
        found[name] = SimpleNamespace(code=process.returncode, out=out, err=output, file=file, stacks="")
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
    # Python 3.14 also prints the thread's name
    assert re.search(rf"Thread {main}( \[.*\])? \(most recent call first\):\n", left.stacks)
    assert left.stacks.startswith("==== hang: rank 3 of 4 on here, 20")
    assert left.stacks.splitlines()[-1].startswith("==== end")


def test_a_users_program_is_not_ended(ended):
    left = ended["hangs_in_a_program"]
    assert (left.code, left.out) == (0, "the end\n")
    assert left.err.startswith(
        "hpctrain: rank 3 of 4 on here hangs: no step for 3 s (health.hang_timeout_s); it is at "
    )
    assert left.err.endswith("; Ctrl-C twice ends it\n")
    assert left.err.count("\n") == 1
    assert "in hangs_in_a_program" in left.stacks


@pytest.mark.parametrize("name", ["takes_its_time", "evaluates_batch_after_batch", "waits_its_turn"])
def test_a_phase_may_take_its_own_time(ended, name):
    left = ended[name]
    assert (left.code, left.out, left.err, left.stacks) == (0, "the end\n", "", "")


def test_the_process_ends_even_if_recording_the_hang_fails(ended):
    left = ended["fails_to_record_it"]
    assert left.code == 1
    assert left.err.endswith("LookupError: no record\n")
    assert "in stand" in left.stacks


def test_the_process_ends_even_if_recording_the_hang_never_ends(ended):
    left = ended["records_it_for_ever"]
    assert (left.code, left.out) == (1, "")
    assert "in stand" in left.stacks


def test_stacks_are_written_while_a_thread_keeps_pythons_lock(ended):
    left = ended["keeps_the_lock"]
    assert (left.code, left.out) == (0, "the end\n")
    assert left.err.startswith("Stack (most recent call first):\n")
    assert "in keeps_the_lock\n" in left.err


def test_a_rank_that_waits_for_the_gpu_ends_once_nccl_has_lost_another(ended):
    left = ended["loses_a_peer"]
    assert (left.code, left.out) == (1, "recorded COMM_ERROR\n")


def test_an_error_that_the_rank_raises_itself_comes_first(ended):
    left = ended["loses_a_peer_and_raises"]
    assert (left.code, left.out) == (1, "")
    assert left.err.endswith("RuntimeError: Connection closed by peer\n")


def test_an_error_of_its_own_comes_first_even_if_its_cleanup_takes_long(ended):
    left = ended["loses_a_peer_and_takes_its_time_to_raise"]
    assert (left.code, left.out) == (1, "")
    assert left.err.endswith("LookupError: of its own\n")


def test_a_users_program_isnt_ended_by_an_error_of_nccl_either(ended):
    left = ended["loses_a_peer_in_a_program"]
    assert (left.code, left.out, left.err) == (0, "the end\n", "")


def test_a_forked_child_is_not_watched_and_can_exit(ended):
    left = ended["forks"]
    assert left.code == 1
    assert left.out.splitlines()[0] == "MainThread"
    assert "no step for 3 s" in left.out
    assert "in forks" in left.stacks


def test_a_suspended_process_did_not_hang(ended):
    left = ended["is_suspended"]
    assert (left.code, left.out, left.stacks) == (0, "ready\nthe end\n", "")


def test_stacks_that_are_asked_for_are_written_and_the_rank_continues(ended):
    left = ended["is_asked"]
    first, second, end = left.out.splitlines()
    assert (left.code, left.err, end) == (0, "", "the end")
    for token in (first, second):
        text = answer(left.file, token)
        assert text.startswith("==== stacks as requested: rank 3 of 4 on here, 20")
        assert "in is_asked\n" in text
    assert left.stacks.count("==== end") == 2


def test_signals_go_to_the_main_thread_alone(ended):
    assert ended["blocks_signals"].out == "unblocking\nhandled\nthe end\n"


def test_a_rank_whose_user_cancels_it_is_asked_to_stop_and_its_handlers_are_checked(ended):
    left = ended["is_cancelled"]
    assert (left.code, left.out) == (0, "SIGTERM True\nthe end\n")


def bounds(**keys):
    health = Health(**keys)
    return {phase.name: phase.bound_s(health) for phase in Phase}


def test_every_phase_is_one_that_the_times_know():
    phases = {doing: Phase.of(doing) for doing in SPENT}
    assert {doing for doing, phase in phases.items() if phase is Phase.START} == set(STARTING)
    assert [phases[doing] for doing in ("train_s", "eval_s", "save_s")] == [
        Phase.TRAINING,
        Phase.EVALUATION,
        Phase.SAVING,
    ]


def test_a_shorter_bound_on_steps_leaves_the_other_phases_their_time():
    assert bounds(hang_timeout_s=60) == {"START": 1800, "TRAINING": 60, "EVALUATION": 1800, "SAVING": 1800}


def test_a_longer_bound_on_steps_holds_for_all():
    assert set(bounds(hang_timeout_s=7200).values()) == {7200}


def test_each_phase_has_a_key_of_its_own():
    given = {"hang_timeout_s": 1, "start_timeout_s": 2, "eval_timeout_s": 3, "save_timeout_s": 4}
    assert bounds(**given) == {"TRAINING": 1, "START": 2, "EVALUATION": 3, "SAVING": 4}


@pytest.mark.parametrize("key", ["hang_timeout_s", "start_timeout_s", "eval_timeout_s", "save_timeout_s"])
@pytest.mark.parametrize("value", [0.5, float("inf"), float("nan"), -1])
def test_bounds_that_cannot_be_are_refused(key, value):
    with pytest.raises(ConfigError, match=rf"health\.{key}=.*must be in \[1, 1e\+07\]"):
        Health(**{key: value})


@pytest.mark.parametrize("longest", ["hang_timeout_s", "start_timeout_s", "eval_timeout_s", "save_timeout_s"])
def test_collectives_wait_longer_than_any_watchdog(longest):
    health = Health(**{longest: 9000})
    assert health.collective_timeout_s > 9000
    assert all(phase.bound_s(health) < health.collective_timeout_s for phase in Phase)


def test_the_complaint_names_the_key_to_change():
    health = Health(hang_timeout_s=90, start_timeout_s=600)
    assert Phase.TRAINING.complaint(health) == "no step for 90 s (health.hang_timeout_s)"
    assert Phase.START.complaint(health) == "no first step within 600 s of start-up (health.start_timeout_s)"


def test_the_rendezvous_times_out_before_the_watchdog_ends_the_start():
    health = Health(start_timeout_s=100)
    assert health.meeting_timeout_s == 90


def test_silence_adds_up_until_the_mark_changes():
    watch = HangWatch(Health(hang_timeout_s=2), now=100.0, every_s=1.0)
    looks = [(1, 101.0), (1, 102.0), (1, 103.5), (2, 104.0), (2, 105.0), (1, 106.0)]
    silences = [(watch.update(Phase.TRAINING, mark, now), watch.silence_s) for mark, now in looks]
    complaint = "no step for 2 s (health.hang_timeout_s)"
    assert silences == [("", 0.0), ("", 1.0), (complaint, 2.5), ("", 0.0), ("", 1.0), ("", 0.0)]


def test_a_process_that_was_suspended_did_not_hang():
    watch = HangWatch(Health(), now=0.0, every_s=1.0)
    for now, silence_s in ((1.0, 0.0), (7200.0, 2.0), (7201.0, 3.0)):
        assert not watch.update(Phase.TRAINING, "mark", now)
        assert watch.silence_s == silence_s


def test_a_fork_never_meets_the_timer():
    program = PROGRAM.with_name("forking.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "0\n"
