"""A rank and a program that reports through hpctrain/session.py: what is recorded, and what a hang leaves behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time

import pytest

from hpctrain import session
from hpctrain.program.processes import WITHOUT_STACKS, Process
from hpctrain.run.checkpoints import saved_step
from hpctrain.run.config_change import change_config
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.saves import read_saves
from hpctrain.run.stacks import answer, request_stacks
from hpctrain.run.times import read_times

TRAINS = """
session.start(total_steps=3)
for step in (1, 2, 3):
    session.step(step, {"train/loss": 1 / step, "odd": float("nan")})
    path = session.checkpoint_dir() / f"{step}.pt"
    path.write_text(str(step))
    session.saved(step, path)
"""
WAITS = """
session.start()
session.step(5)
open("ready", "w").close()
while not session.should_stop():
    time.sleep(0.01)
open("saved.pt", "w").close()
session.saved(5, "saved.pt")
"""
HANGS = """
def stand():
    open("ready", "w").close()
    time.sleep(60)
session.start()
session.step(7)
stand()
"""


@pytest.fixture
def python(program):
    """Make a run of a Python program that imports a copy of session.py."""

    def make(text, **keys):
        run = program(sys.executable, "-S", "train.py", **keys)
        shutil.copy(session.__file__, run.folder)
        (run.folder / "train.py").write_text(f"import os, sys, time\nimport session\n{text}")
        return run

    return make


def metrics(run):
    return [json.loads(line) for line in run.directory.metrics.read_text().splitlines()]


def await_metric(run, step):
    deadline = time.monotonic() + 10
    while not run.directory.metrics.exists() or metrics(run)[-1:] == [] or metrics(run)[-1]["step"] < step:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_everything_is_recorded(python):
    run = python(f"{TRAINS}session.done()")
    code, record = run.run()
    assert (code, record.reason, record.step, record.done) == (0, Reason.COMPLETED, 3, True)
    assert [(one["step"], one["train/loss"], one["odd"]) for one in metrics(run)] == [
        (1, 1.0, None),
        (2, 0.5, None),
        (3, 1 / 3, None),
    ]
    saves = read_saves(run.directory)
    assert [(one.step, one.path, one.attempt) for one in saves] == [
        (step, run.directory.checkpoints / f"{step}.pt", 1) for step in (1, 2, 3)
    ]
    assert saved_step(run.directory) == 3
    times = read_times(run.directory.attempt(1))
    assert (times["last_step"], times["total_steps"]) == (3, 3)
    assert {"import_s", "first_step_s", "train_s"} <= times.keys()


def test_saves_that_are_not_there_are_one_warning(python):
    run = python("session.step(4); [session.saved(4, name) for name in ('no.pt', 'nor.pt', sys.argv[0])]")
    assert run.run()[0] == 0
    (line,) = [line for line in run.log().splitlines() if "isn't there" in line]
    assert "the save of step 4 isn't there:" in line
    assert f"{run.folder}/no.pt; report a save once it is written" in line
    assert saved_step(run.directory) == 4


def test_a_resumed_attempt_drops_the_metrics_of_steps_that_it_repeats(python):
    first = python(f"{TRAINS}session.step(4, {{'a': 4}}); session.step(5, {{'a': 5}}); os.abort()")
    assert first.run()[1].reason is Reason.INFRASTRUCTURE
    assert [one["step"] for one in metrics(first)] == [1, 2, 3, 4, 5]
    again = python("assert session.last_save().step == 3\nsession.step(6, {'a': 6})")
    assert again.attempt == 2
    assert again.run()[1].reason is Reason.COMPLETED
    # step 6 is the first one that it reports, and step 3 the one that it resumed from
    assert [one["step"] for one in metrics(again)] == [1, 2, 3, 6]
    assert Ledger(again.directory).attempt(2).start_step == 3
    assert read_times(again.directory.attempt(2))["resumed_step"] == 5


def test_a_program_without_saves_drops_what_follows_its_first_step(python):
    assert python("for step in (1, 2, 3): session.step(step, {'a': step})").run()[0] == 0
    again = python("session.step(3, {'a': 30}); session.step(2, {'a': 0}); session.step(3, {'b': 31})")
    again.run()
    assert [(one["step"], one.get("a"), one.get("b")) for one in metrics(again)] == [
        (1, 1, None),
        (2, 2, None),
        (3, 30, None),
        (3, None, 31),
    ]
    assert "metrics of step 2 came after those of step 3: they are dropped" in again.log()


def test_a_process_that_is_started_again_replaces_the_metrics_of_its_predecessor(python):
    text = "session.start(); [session.step(n, {'a': os.getppid() > 1}) for n in range(1, int(sys.argv[1]))]"
    run = python(text)
    run = python(text)  # a new attempt of the same folder
    (run.folder / "both.py").write_text(
        "import subprocess, sys\nfor last in ('6', '4'): subprocess.run([sys.executable, '-S', 'train.py', last])"
    )
    run.directory.config.write_text(run.directory.config.read_text().replace("train.py", "both.py"))
    run.run()
    assert [one["step"] for one in metrics(run)] == [1, 2, 3]


EVALUATES = """
import subprocess
if sys.argv[1:]:
    session.start()
    if sys.argv[1] != "silent":
        session.step(int(sys.argv[1]), {"eval/loss": 1})
        session.step(int(sys.argv[1]) + 1, {"eval/loss": 2})
    sys.exit()
def evaluate(step):
    subprocess.run([sys.executable, "-S", __file__, step], check=True)
"""
"""The script evaluates in a child, which inherits HPCTRAIN_SESSION and RANK."""


@pytest.mark.parametrize(("evaluated", "dropped"), [("silent", 0), ("1", 2), ("3", 1)])
def test_a_child_that_reports_deletes_nothing(python, evaluated, dropped):
    text = "for step in (1, 2, 3, 4): session.step(step, {'a': step})\n"
    run = python(f"{EVALUATES}session.saved(1, 'train.py')\n{text}evaluate('{evaluated}')\nsession.step(5, {{'a': 5}})")
    assert run.run()[1].reason is Reason.COMPLETED
    assert [one["a"] for one in metrics(run) if "a" in one] == [1, 2, 3, 4, 5]
    assert sum("eval/loss" in one for one in metrics(run)) == (0 if evaluated == "silent" else 2 - dropped)
    assert ("they are dropped" in run.log()) == bool(dropped)


READ_LATE = """
import signal, subprocess
os.kill(os.getppid(), signal.SIGSTOP)
wait = f"until grep -q '^State:.Z' /proc/{os.getpid()}/status; do sleep 0.01; done"
subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {os.getppid()}"])
"""
"""hpctrain reads nothing until the script has ended."""


@pytest.mark.parametrize("after", ["", "session.step(4, {'a': 4})"])
def test_a_child_deletes_nothing_if_its_reports_are_read_late(python, after):
    text = "for step in (1, 2, 3): session.step(step, {'a': step})\n"
    run = python(f"{EVALUATES}{READ_LATE}session.saved(1, 'train.py')\n{text}evaluate('2')\n{after}")
    assert run.run()[1].reason is Reason.COMPLETED
    assert [one["a"] for one in metrics(run) if "a" in one] == ([1, 2, 3, 4] if after else [1, 2, 3])


def test_an_evaluation_of_saves_after_the_training_deletes_nothing(python):
    run = python(f"{EVALUATES}import shutil\n{TRAINS}os.execlp('sh', 'sh', '-c', sys.executable + ' -S train.py 2')")
    run.run()
    assert [one["step"] for one in metrics(run)] == [1, 2, 3, 3]


def test_metrics_with_the_names_of_a_records_own_fields_are_skipped(python):
    run = python("for n in (1, 2): session.step(n, {'a': n, 'step': 9, 'time': 0, 'nonfinite': 1}); session.step(2)")
    assert run.run()[1].step == 2
    assert [(one["step"], one["a"], one["time"] > 1, "nonfinite" in one) for one in metrics(run)] == [
        (1, 1, True, False),
        (2, 2, True, False),
    ]
    for name in ("step", "time", "nonfinite"):
        assert run.log().count(f"the metric '{name}' is skipped: records have a field of this name") == 1


def test_a_save_is_recorded_once_the_file_system_answers(python):
    text = "session.step(1, {'a': 1})\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    text += "session.step(2, {'a': 2})\nsession.saved(2, 'train.py')\n"
    run = python(f"{text}while not os.path.exists('on'): time.sleep(0.01)\nsession.step(3, {{'a': 3}})")
    process = run.start()
    await_metric(run, 1)
    claims = run.directory.claims
    away = claims.rename(claims.with_name("away"))
    claims.symlink_to("x" * 300)  # each look-up fails: the name is too long
    (run.folder / "go").touch()
    deadline = time.monotonic() + 10
    while "the save of step 2 can't be recorded for now" not in run.log():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    claims.unlink()
    away.rename(claims)
    (run.folder / "on").touch()
    assert (process.wait(), run.record().reason) == (0, Reason.COMPLETED)
    assert [one.step for one in read_saves(run.directory)] == [2]
    assert [one["step"] for one in metrics(run)] == [1, 2, 3]


def test_a_stop_reaches_a_session(python):
    run = python(WAITS)
    code, record = run.stopped(signal.SIGUSR2)
    assert (code, record.reason, record.step, record.stop_signal) == (0, Reason.INTERRUPTED, 5, signal.SIGUSR2)
    assert [(one.step, one.path) for one in read_saves(run.directory)] == [(5, run.folder / "saved.pt")]


def test_a_stop_for_the_deadline_is_one_for_the_time_limit(python):
    run = python(WAITS)
    _, record = run.run(HPCTRAIN_DEADLINE=str(time.time() + 0.5))
    assert (record.reason, record.stop_signal, record.step) == (Reason.TIME_LIMIT, None, 5)


def test_a_program_that_is_done_is_complete_whatever_follows(python):
    run = python("session.step(9)\nsession.done()\nsys.exit(3)")
    code, record = run.run()
    assert (code, record.reason, record.done, record.step) == (0, Reason.COMPLETED, True, 9)
    assert "had called session.done(): the run is complete" in run.log()


def test_the_progress_of_a_running_program_is_recorded(python):
    run = python("session.start(total_steps=9)\nsession.step(2, {'a': 1})\nopen('ready', 'w').close()\ntime.sleep(30)")
    change_config(run.directory, run.directory.config.read_text() + "\n")
    assert run.directory.config_before.exists()
    process = run.start()
    await_metric(run, 2)
    deadline = time.monotonic() + 20
    while read_times(run.directory.attempt(1)).get("last_step") != 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert read_times(run.directory.attempt(1)).items() >= {"last_step": 2, "total_steps": 9}.items()
    assert not run.directory.config_before.exists()  # it trains with the change
    run.end(process)


@pytest.mark.parametrize(
    ("text", "kept"), [("", True), ("session.start()", False), ("session.start(); session.step(3)", True)]
)
def test_a_change_is_kept_if_the_program_ran_with_it(python, text, kept):
    run = python(text)
    change_config(run.directory, run.directory.config.read_text() + "\n")
    assert run.run()[0] == 0
    assert run.directory.config_before.exists() == (not kept)


def test_reports_of_a_superseded_attempt_are_not_written(python):
    text = "session.step(1, {'a': 1})\nopen('ready', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
    run = python(f"{text}session.saved(2, 'x')\ntime.sleep(30)")
    process = run.start()
    run.await_file("ready")
    Ledger(run.directory).claim()
    (run.folder / "go").touch()
    assert process.wait() == 0
    assert (read_saves(run.directory), run.record().reason) == ([], Reason.INTERRUPTED)


def test_a_hang_leaves_stacks_and_a_record(python):
    run = python(HANGS, health={"hang_timeout_s": 1})
    code, record = run.run()
    assert (code, record.reason, record.step, record.blames_peer) == (1, Reason.HANG, 7, False)
    place = re.escape(f"stand in {run.folder}/train.py:")
    start = rf"no step for 1 s \(health.hang_timeout_s\); it was at {place}\d+; stacks: {run.directory.stacks(1, 0)}"
    assert re.fullmatch(start, record.message)
    stacks = run.directory.stacks(1, 0).read_text()
    assert stacks.startswith("==== hang: rank 0 of 1 on ")
    assert re.search(r"^ +\d+ S +\S+ +.*python.* -S train.py$", stacks, re.MULTILINE)
    assert "in stand\n" in stacks


def test_a_hang_in_a_collective_is_the_fault_of_another_rank(python):
    run = python("sys.path.insert(0, 'torch')\nimport distributed\n", health={"hang_timeout_s": 1})
    (run.folder / "torch" / "distributed").mkdir(parents=True)
    module = HANGS.replace("def stand", "import session, time\ndef stand")
    (run.folder / "torch" / "distributed" / "__init__.py").write_text(module)
    assert run.start(rank=1, world_size=2).wait() == 1
    record = run.record(1)
    assert (record.reason, record.blames_peer) == (Reason.HANG, True)
    # it asked the other ranks for theirs
    assert run.directory.stacks_request(1).exists()


@pytest.mark.nightly
def test_a_program_that_is_suspended_hangs_by_its_own_fault(python):
    run = python(
        HANGS.replace("time.sleep(60)", "import signal; os.kill(os.getpid(), signal.SIGSTOP)"),
        health={"hang_timeout_s": 1},
    )
    record = run.run()[1]
    assert (record.reason, record.blames_peer) == (Reason.HANG, False)
    assert re.search(r"^ +\d+ T +", record.traceback, re.MULTILINE)


@pytest.mark.nightly
def test_a_start_that_takes_too_long_is_a_hang(python):
    run = python(HANGS.replace("session.step(7)\n", ""), health={"start_timeout_s": 1})
    assert "no first step within 1 s of start-up (health.start_timeout_s)" in run.run()[1].message


def test_slow_programs_that_report_no_steps_or_are_done_dont_hang(python):
    run = python(
        "time.sleep(1.5)\nsession.start()\nsession.step(1)\nsession.done()\ntime.sleep(1.5)",
        health={"hang_timeout_s": 1, "start_timeout_s": 1},
    )
    assert run.run()[1].reason is Reason.COMPLETED


@pytest.mark.parametrize("with_session", [True, False])
def test_stacks_on_request(python, program, with_session):
    run = python(HANGS) if with_session else program("sh", "-c", "touch ready; sleep 30; true")
    process = run.start()
    run.await_file("ready")
    deadline = time.monotonic() + 20
    # the shell makes the file before it starts sleep
    while not with_session and "sleep 30" not in [one.command for one in Process.of(process.pid).descendants()]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    token = request_stacks(run.directory.stacks_request(1))
    while (found := answer(run.directory.stacks(1, 0), token)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.end(process)
    assert found.startswith("==== stacks as requested: rank 0 of 1 on ")
    if with_session:
        assert "in stand\n" in found
        assert WITHOUT_STACKS not in found
    else:
        assert re.search(r"^ +\d+ [RSD] .* sleep 30$", found, re.MULTILINE)
        assert WITHOUT_STACKS in found


def test_a_program_that_has_replaced_itself_is_not_signalled(python):
    run = python("session.start()\nsession.step(1)\nos.execlp('sh', 'sh', '-c', 'touch ready; exec sleep 30')")
    process = run.start()
    run.await_file("ready")
    token = request_stacks(run.directory.stacks_request(1))
    deadline = time.monotonic() + 10
    while (found := answer(run.directory.stacks(1, 0), token)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert WITHOUT_STACKS in found
    assert process.runs
    assert run.record() is None
    run.end(process)


def test_the_pid_of_a_stranger_is_not_signalled(python):
    text = "import json\n"
    text += "with open(os.environ['HPCTRAIN_SESSION'] + '/events', 'w') as file:\n"
    event = "{'event': 'start', 'pid': os.getpid() - 1, 'stacks': True}"
    text += f"    file.write(json.dumps({event}) + '\\nnonsense\\n')\n"
    text += "open('ready', 'w').close()\ntime.sleep(30)"
    run = python(text)
    process = run.start()
    run.await_file("ready")
    token = request_stacks(run.directory.stacks_request(1))
    deadline = time.monotonic() + 10
    while answer(run.directory.stacks(1, 0), token) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert re.search(r"^process \d+:", answer(run.directory.stacks(1, 0), token), re.MULTILINE) is None
    assert run.log().count("a report of the program is malformed") == 1
    run.end(process)
