"""Stops of one rank: which process gets which signal, and what the record says."""

from __future__ import annotations

import json
import re
import signal
import sys
import time

import pytest

from hpctrain.attempt.outcome import Outcome
from hpctrain.program.loop import REPEATED_S
from hpctrain.program.processes import Process
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

SAVES = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.2)
    open("saved", "a").write(signal.Signals(number).name + " ")
    sys.exit({code})
signal.signal(signal.{name}, save)
open("ready", "w").close()
# in short sleeps: a signal just before the system call of a sleep is handled only after it
for _ in range(300): time.sleep(0.1)
"""


def saver(name="SIGTERM", code=0):
    return SAVES.format(name=name, code=code)


@pytest.mark.parametrize("received", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_program_gets_its_own_signal(program, received):
    run = program(sys.executable, "-Sc", saver("SIGHUP"), signal="HUP")
    code, record = run.stopped(received)
    assert (code, record.reason, record.stop_signal) == (0, Reason.INTERRUPTED, received)
    assert (run.folder / "saved").read_text() == "SIGHUP "
    assert re.search(rf"{received.name} received: sent SIGHUP to \d+ \(.*python", run.log())


def test_a_signal_that_comes_twice_is_passed_on_once(program):
    text = saver().replace("sys.exit(0)", "time.sleep(0.3); done.append(0)\n    if len(done) > 1: sys.exit(0)")
    run = program(sys.executable, "-Sc", "done = []\n" + text)
    process = run.start()
    run.await_file("ready")
    process.send_signal(signal.SIGTERM)
    run.await_log("received: sent SIGTERM")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2 * REPEATED_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert run.log().count("received: sent SIGTERM") == 2


@pytest.mark.parametrize(
    ("code", "on_stop", "reason"),
    [(7, "requeue", "interrupted"), (0, "exit_code", "completed"), (7, "exit_code", "failed")],
)
def test_the_code_after_a_stop(program, code, on_stop, reason):
    run = program(sys.executable, "-Sc", saver(code=code), on_stop=on_stop)
    ended, record = run.stopped()
    assert (record.reason, record.stop_signal) == (Reason(reason), signal.SIGTERM)
    assert ended == 0  # a launcher would kill the other ranks, which may still save
    said = {"interrupted": "after the stop: exit code 7", "failed": "exit code 7, without any output"}
    assert record.message == said.get(reason, "")


@pytest.mark.parametrize(
    "script",
    [
        "{}; touch went_on",
        "set -e; ({}; touch went_on); touch went_on",
        "{} | tee copy; touch went_on",
        "trap 'touch cleaned' EXIT; {}; touch went_on",
        "bash -c '{}; touch went_on'; touch went_on",
        "{} & wait $!; touch went_on",
    ],
)
def test_a_shell_is_stopped_after_the_program_that_it_runs(program, script):
    run = program("bash", "-c", script.format("python3 -S save.py"))
    (run.folder / "save.py").write_text(saver())
    code, record = run.stopped()
    assert (code, record.reason) == (0, Reason.INTERRUPTED)
    assert (run.folder / "saved").read_text() == "SIGTERM "
    assert not (run.folder / "went_on").exists()
    assert (run.folder / "cleaned").exists() == ("cleaned" in script)


WRAPPER = "import subprocess, sys; subprocess.run([sys.executable, '-S', 'save.py']); open('went_on', 'w')"
"""A program that neither handles a signal nor passes it on."""
WAITS_IN_VAIN = "import os, sys, time\nif os.fork() == 0:\n    exec(open('save.py').read())\ntime.sleep(0.1)\n"


@pytest.mark.parametrize(
    ("command", "went_on"),
    [
        ([sys.executable, "-Sc", WRAPPER], True),
        (["sh", "-c", "echo save.py | xargs python3 -S"], False),
        (["setsid", "-w", "python3", "-S", "save.py"], False),
        (["sh", "-c", f'python3 -Sc "{WRAPPER}"; touch went_on_too'], True),
        ([sys.executable, "-Sc", "import subprocess; subprocess.run(['sh', '-c', 'python3 -S save.py; true'])"], False),
    ],
    ids=["subprocess", "xargs", "setsid", "below a shell", "above a shell"],
)
def test_a_program_behind_one_that_passes_no_signals_on(program, command, went_on):
    run = program(*command)
    (run.folder / "save.py").write_text(saver())
    code, record = run.stopped()
    assert (code, record.reason) == (0, Reason.INTERRUPTED)
    assert (run.folder / "saved").read_text() == "SIGTERM "
    assert (run.folder / "went_on").exists() == went_on
    assert not (run.folder / "went_on_too").exists()


def test_the_children_of_a_program_that_handles_the_signal_get_none(program):
    text = "import os\nname = '' if os.fork() else 'childs_'\n" + saver().replace('"saved"', 'name + "saved"')
    text = text.replace('"ready"', 'name + "ready"').replace("time.sleep(0.2)", "time.sleep(not name and 0.5)")
    run = program(sys.executable, "-Sc", text)
    process = run.start()
    run.await_file("childs_ready")
    run.await_file("ready")
    process.send_signal(signal.SIGTERM)
    assert run.await_file("saved") is not None
    assert not (run.folder / "childs_saved").exists()
    run.end(process)


def test_a_parent_that_writes_for_its_child_is_not_suspended(program):
    text = "import subprocess\nchild = subprocess.Popen(['python3', '-S', 'save.py'], stdout=subprocess.PIPE)\n"
    text += "open('read', 'w').write(str(len(child.stdout.read())))"
    run = program(sys.executable, "-Sc", text)
    (run.folder / "save.py").write_text(saver().replace("time.sleep(0.2)", "print('x' * 2**20, flush=True)"))
    assert run.stopped()[1].reason is Reason.INTERRUPTED
    assert (run.folder / "saved").read_text() == "SIGTERM "
    assert (run.folder / "read").read_text() == str(2**20 + 1)


def test_what_reads_the_output_may_write_it_to_the_end(program):
    reads = "import sys, time; text = sys.stdin.read(); time.sleep(0.5); open('copy', 'w').write(text)"
    run = program("bash", "-c", f'python3 -S save.py | python3 -Sc "{reads}"; touch went_on')
    (run.folder / "save.py").write_text(saver().replace("time.sleep(0.2)", "print('last line')"))
    assert run.stopped()[1].reason is Reason.INTERRUPTED
    assert (run.folder / "copy").read_text() == "last line\n"
    assert not (run.folder / "went_on").exists()


def test_a_program_that_reads_the_stop_file_behind_another(program):
    text = "import os, signal, time; folder = os.environ['HPCTRAIN_SESSION']\nsignal.signal(15, signal.SIG_IGN)\n"
    text += "open(folder + '/events', 'w').write('{\"event\": \"start\", \"pid\": %d}\\n' % os.getpid())\n"
    text += "open('ready', 'w')\nwhile not os.path.exists(folder + '/stop'): time.sleep(0.01)\ntime.sleep(0.3)\n"
    run = program(sys.executable, "-Sc", WRAPPER)
    (run.folder / "save.py").write_text(text + "open('saved', 'w')")
    process = run.start()
    run.await_file("ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert (run.folder / "saved").exists()


def test_a_daemon_is_not_waited_for(program):
    run = program("bash", "-c", "setsid -f sleep 54399; python3 -S save.py; true")
    (run.folder / "save.py").write_text(saver())
    assert run.stopped()[1].reason is Reason.INTERRUPTED  # within 30 s
    assert (run.folder / "saved").read_text() == "SIGTERM "


def test_what_outlives_the_first_process_may_save_until_a_second_ctrl_c(program):
    run = program("bash", "-c", "trap 'exit 0' TERM; python3 -S save.py & wait")
    (run.folder / "save.py").write_text(saver().replace("time.sleep(0.2)", "open('saves', 'w'); time.sleep(30)"))
    process = run.start()
    run.await_file("ready")
    process.send_signal(signal.SIGINT)
    run.await_file("saves")
    time.sleep(0.3)
    assert process.runs
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    assert not (run.folder / "saved").exists()


def test_a_shell_whose_code_is_believed_may_end_by_itself(program):
    run = program("bash", "-c", "python3 -S save.py; exit $?", on_stop="exit_code")
    (run.folder / "save.py").write_text(saver(code=0))
    assert run.stopped()[1].reason is Reason.COMPLETED


def test_a_shell_that_traps_the_signal_gets_it(program):
    run = program("bash", "-c", "trap 'touch trapped; exit 0' TERM; touch ready; while true; do sleep 0.05; done")
    assert run.stopped()[1].reason is Reason.INTERRUPTED
    assert (run.folder / "trapped").exists()


def test_a_shell_without_a_program_gets_it(program):
    run = program("bash", "-c", "touch ready; while true; do :; done")
    assert run.stopped()[1].message == "after the stop: killed by SIGTERM"


@pytest.mark.parametrize("first", ["program", "rank"])
def test_a_signal_to_all_processes_at_once(program, first):
    run = program("bash", "-c", "python3 -S save.py; touch went_on")
    (run.folder / "save.py").write_text(saver().replace("time.sleep(0.2)", "time.sleep(0.8)"))
    process = run.start()
    run.await_file("ready")
    below = [*Process.of(process.pid).descendants()]
    if first == "rank":
        process.send_signal(signal.SIGTERM)
    for one in below:
        one.send(signal.SIGTERM)
    if first == "program":
        shell = below[0]
        while shell.alive:
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert run.record().reason is Reason.INTERRUPTED
    assert (run.folder / "saved").read_text().startswith("SIGTERM ")
    assert not (run.folder / "went_on").exists()


def test_the_stop_is_in_a_file_beside_the_events(program):
    text = "import os, time; p = os.environ['HPCTRAIN_SESSION'] + '/stop'; open('ready', 'w').close()\n"
    text += "while not os.path.exists(p): time.sleep(0.01)\nopen('seen', 'w').write(open(p).read())"
    run = program(sys.executable, "-Sc", f"import signal; signal.signal(15, signal.SIG_IGN)\n{text}")
    run.stopped(signal.SIGUSR2, HPCTRAIN_DEADLINE="2000000000")
    seen = json.loads((run.folder / "seen").read_text())
    assert (seen["signal"], seen["deadline"]) == ("SIGUSR2", 2_000_000_000)
    assert abs(seen["time"] - time.time()) < 30


def test_a_cancelled_program_stops_though_it_is_suspended(program):
    run = program("sh", "-c", "python3 -S save.py; true")
    (run.folder / "save.py").write_text(saver().replace("import signal", "import os, signal") + "\n")
    process = run.start()
    run.await_file("ready")
    (python,) = [one for one in Process.of(process.pid).descendants() if "save.py" in one.command.split()]
    python.send(signal.SIGSTOP)
    run.directory.stop_file(run.attempt).touch()
    assert process.wait() == 0
    assert (run.folder / "saved").read_text() == "SIGTERM "
    assert "hpctrain: cancelled by the user: sent SIGTERM to" in run.log()
    assert Outcome.of_attempt(run.directory, run.attempt, 1).reason is Reason.CANCELLED


@pytest.mark.nightly
def test_a_cancelled_program_that_does_not_end_is_killed(program):
    ignores = "trap '' TERM; touch ready; while true; do sleep 0.05; done"
    run = program("sh", "-c", ignores, health={"save_timeout_s": 1})
    process = run.start()
    run.await_file("ready")
    run.directory.stop_file(run.attempt).touch()
    assert process.wait() == 0
    assert "cancelled, and still running after health.save_timeout_s: killing the program" in run.log()
    assert Outcome.of_attempt(run.directory, run.attempt, 1).reason is Reason.CANCELLED


def test_a_second_ctrl_c_kills_it(program):
    run = program("sh", "-c", "trap '' TERM; touch ready; while true; do sleep 0.05; done")
    process = run.start()
    run.await_file("ready")
    process.send_signal(signal.SIGINT)
    run.await_log("SIGINT received: sent SIGTERM")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert run.record().reason is Reason.INTERRUPTED
    assert "second Ctrl-C" in run.record().message


def test_a_stop_before_the_start(program):
    run = program("sh", "-c", "sleep 5; touch started")
    process = run.start()
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert (run.record().reason, run.record().stop_signal) == (Reason.INTERRUPTED, signal.SIGTERM)
    assert not (run.folder / "started").exists()


def test_the_program_of_a_superseded_attempt_is_killed(program):
    run = program("sh", "-c", "touch ready; sleep 30")
    process = run.start()
    run.await_file("ready")
    Ledger(run.directory).claim()
    assert process.wait(timeout=30) == 0
    record = run.record()
    assert (record.reason, "superseded by attempt 2" in record.message) == (Reason.INTERRUPTED, True)
