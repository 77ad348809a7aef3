from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm
from hpctrain.status.jobs import ASK_EVERY_S
from hpctrain.status.run_status import read_statuses
from hpctrain.status.state import RunState
from hpctrain.top.watch import FIND_EVERY_S, READ_EVERY_S, Watch
from tests.unit.fakes import FakeSlurm


@pytest.fixture
def slurm(tmp_path):
    return FakeSlurm(tmp_path / "bin")


@pytest.fixture
def watch(tmp_path, clock, slurm):
    client = Slurm(slurm.environ, run=slurm.run)
    return Watch(tmp_path / "runs", clock, lambda job_ids, warn: client.find(job_ids))


@pytest.fixture
def make_run(tmp_path):
    def make(name, job_id="12", *, begun=True):
        directory = RunDirectory.at(tmp_path / "runs" / name)
        directory.create(0o750)
        directory.config.write_text("name: digits\ntrainer:\n  max_steps: 100\n")
        JobRecords(directory).add({"job_id": job_id, "time": 1.0, "log": None})
        if begun:
            begin(directory, 0, job_id)
        return directory

    return make


def begin(directory, step, job_id="12"):
    ledger = Ledger(directory)
    number = ledger.claim()
    ledger.start(number, job_id=job_id, nodes=["n1"], world_size=1, step=step)


def log(directory, *steps, resumed=0):
    sink = JsonLinesSink(directory.metrics, resumed, clock=lambda: 5.0)
    for step in steps:
        sink.log(step, {"train/loss": 1 / step})
    sink.close()


def test_a_run_that_trains_is_interrupted_and_resumes(watch, make_run, slurm, clock):
    directory = make_run("a")
    slurm.queue(j12={"State": "RUNNING"})
    log(directory, 10, 20, 30)
    watch.update()
    (run,) = watch.runs
    assert run.status.state is RunState.UNKNOWN  # SLURM has not been asked
    assert watch.ask(pytest.fail)
    watch.update()
    assert (run.status.state, run.status.step, run.status.total_steps) == (RunState.RUNNING, 30, 100)
    log(directory, 40, resumed=30)
    watch.update()
    assert (run.status.step, run.status.metrics) == (40, {"train/loss": 1 / 40})
    assert [step for step, _ in run.curves.by_name["train/loss"].points()][-1] == 40
    Ledger(directory).end(1, reason=Reason.PREEMPTED, step=40)
    slurm.queue(j12={"State": "PENDING", "Reason": "Priority"})
    clock.advance(ASK_EVERY_S)
    watch.update()
    assert watch.ask(pytest.fail)
    watch.update()
    assert run.status.state is RunState.QUEUED
    # the resume drops what came after its step
    begin(directory, 20)
    log(directory, 25, resumed=20)
    slurm.queue(j12={"State": "RUNNING"})
    clock.advance(ASK_EVERY_S)
    watch.ask(pytest.fail)
    watch.update()
    assert (run.status.state, run.status.step) == (RunState.RUNNING, 25)
    assert [step for step, _ in run.curves.by_name["train/loss"].points()] == [10, 20, 25]
    (plain,) = read_statuses([directory], brief=True, ask=lambda job_ids, warn: watch.query.answers)
    assert plain == run.status


def test_slurm_is_asked_once_for_all_and_seldom(watch, make_run, slurm, clock):
    for number in range(5):
        make_run(str(number), f"12_{number}")
    slurm.queue(**{f"j12_{number}": {"State": "RUNNING"} for number in range(5)})
    for _ in range(25):
        watch.update()
        watch.ask(pytest.fail)
        clock.advance(1)
    assert len(slurm.questions) == 3
    assert set(slurm.questions[0].split(",")) == {f"12_{number}" for number in range(5)}


def test_jobs_that_are_over_are_not_asked_about_again(watch, make_run, slurm, clock):
    for number in range(2):
        make_run(str(number), f"{number + 1}")
    slurm.queue(j1={"State": "FAILED"}, j2={"State": "RUNNING"})
    for _ in range(2):
        watch.update()
        watch.ask(pytest.fail)
        watch.update()
        clock.advance(ASK_EVERY_S)
    assert [set(asked.split(",")) for asked in slurm.questions] == [{"1", "2"}, {"2"}]


def test_a_silent_controller_leaves_the_last_answer(watch, make_run, slurm, clock):
    make_run("a")
    slurm.queue(j12={"State": "RUNNING"})
    watch.update()
    watch.ask(pytest.fail)
    watch.query._ask = lambda job_ids, warn: None
    clock.advance(ASK_EVERY_S)
    assert watch.ask(pytest.fail)
    watch.update()
    assert watch.runs[0].status.state is RunState.RUNNING
    assert watch.query.silent


def test_without_slurm_the_records_decide(tmp_path, make_run, clock):
    make_run("a")
    watch = Watch(tmp_path / "runs", clock, lambda job_ids, warn: None)
    watch.update()
    watch.ask(pytest.fail)
    watch.update()
    assert watch.runs[0].status.note == "SLURM can't be reached from here"


def test_runs_appear_and_vanish(watch, make_run, clock):
    watch.update()
    assert watch.runs == ()
    first = make_run("first")
    watch.update()
    assert watch.runs == ()
    clock.advance(FIND_EVERY_S)
    watch.update()
    assert [run.name for run in watch.runs] == ["first"]
    shutil.rmtree(first.path)
    watch.update()
    assert watch.runs == ()
    make_run("second")
    watch.find_soon()
    watch.update()
    assert [run.name for run in watch.runs] == ["second"]


def test_a_run_that_turns_unreadable_and_back(watch, make_run, clock):
    directory = make_run("a")
    watch.update()
    good = directory.attempts.read_text()
    directory.attempts.write_text(json.dumps({"event": "end", "attempt": 1, "time": "late"}) + "\n")
    watch.update()
    (run,) = watch.runs
    assert run.status.state is RunState.UNREADABLE
    assert "expected time to be epoch seconds" in run.status.note
    directory.attempts.unlink()
    directory.attempts.mkdir()
    watch.update()
    assert run.status.state is RunState.UNREADABLE
    directory.attempts.rmdir()
    directory.attempts.write_text(good)
    watch.update()
    assert run.status.state is RunState.UNKNOWN


def test_metrics_that_can_not_be_read_hide_only_themselves(watch, make_run):
    directory = make_run("a")
    directory.metrics.mkdir()
    watch.update()
    assert watch.runs[0].status.metrics == {}
    assert watch.runs[0].status.state is RunState.UNKNOWN


def test_a_run_itself_may_be_the_folder(tmp_path, make_run, clock):
    directory = make_run("a")
    watch = Watch(directory.path, clock)
    watch.update()
    assert [run.name for run in watch.runs] == ["a"]


def test_an_unchanged_run_is_not_read_again(watch, make_run, slurm, clock):
    directory = make_run("a")
    slurm.queue(j12={"State": "RUNNING"})
    watch.update()
    watch.ask(pytest.fail)
    watch.update()
    (run,) = watch.runs
    before = run.status
    os.utime(directory.logs)
    clock.advance(1)
    watch.update()
    assert run.status is before


def test_metrics_of_an_unchanged_size_and_time_are_read_again_after_a_while(watch, make_run, slurm, clock):
    directory = make_run("a")
    log(directory, 10)
    slurm.queue(j12={"State": "RUNNING"})
    watch.update()
    watch.ask(pytest.fail)
    watch.update()
    (run,) = watch.runs
    before = directory.metrics.stat()
    directory.metrics.write_text(directory.metrics.read_text().replace("0.1", "0.2"))
    # as over NFS, whose client remembers size and time of the last change
    os.utime(directory.metrics, ns=(before.st_atime_ns, before.st_mtime_ns))
    watch.update()
    assert run.curves.last.values["train/loss"] == 0.1
    clock.advance(READ_EVERY_S)
    watch.update()
    assert run.curves.last.values["train/loss"] == 0.2


def test_while_slurm_is_asked_its_last_answer_counts(watch, make_run, slurm, clock):
    make_run("a")
    slurm.queue(j12={"State": "RUNNING"})
    watch.update()
    watch.ask(pytest.fail)
    clock.advance(ASK_EVERY_S)
    silent = []
    answer = watch.query._ask
    watch.query._ask = lambda job_ids, warn: silent.append(watch.query.silent) or answer(job_ids, warn)
    assert watch.ask(pytest.fail)
    assert (silent, watch.query.silent) == ([False], False)


def test_a_folder_that_can_not_be_read_keeps_its_runs(watch, make_run, clock, monkeypatch):
    make_run("a")
    watch.update()

    def refuse(root):
        raise PermissionError(errno.EACCES, "Permission denied", str(root))

    clock.advance(FIND_EVERY_S)
    with monkeypatch.context() as patched:
        patched.setattr("hpctrain.top.watch.find_runs", refuse)
        watch.update()
    assert "Permission denied" in watch.problem
    assert [run.name for run in watch.runs] == ["a"]
    clock.advance(FIND_EVERY_S)
    watch.update()
    assert watch.problem == ""
