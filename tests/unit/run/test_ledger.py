from __future__ import annotations

import errno
import json
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.errors import RunDirectoryError, SupersededError
from hpctrain.files import append_json_line, read_json_lines
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, EndFacts, Ledger, StartFacts
from hpctrain.run.reason import Reason
from hpctrain.run.secret import read_secret
from hpctrain.run.times import PhaseTimes


@pytest.fixture
def ledger(tmp_path):
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    return Ledger(directory, clock=lambda: 1000.0)


def test_the_records_are_those_of_the_contract(ledger):
    assert ledger.claim() == 1
    ledger.start(1, job_id="12", nodes=["n1", "n2"], world_size=4, step=0)
    ledger.end(1, reason=Reason.PREEMPTED, step=140)
    lines = [json.loads(line) for line in ledger.directory.attempts.read_text().splitlines()]
    assert lines == [
        {
            "event": "start",
            "attempt": 1,
            "job_id": "12",
            "nodes": ["n1", "n2"],
            "world_size": 4,
            "step": 0,
            "time": 1000.0,
        },
        {"event": "end", "attempt": 1, "reason": "preempted", "step": 140, "time": 1000.0},
    ]


@pytest.mark.parametrize("reason", list(Reason))
def test_an_attempt_goes_there_and_back(ledger, reason):
    number = ledger.claim()
    ledger.start(number, job_id="12_3", nodes=["n1"], world_size=2, step=40)
    assert ledger.attempts()[-1].open
    ledger.end(number, EndFacts(requeued_by="batch script"), reason=reason, step=90, detail="why\0")
    assert ledger.attempts() == [
        Attempt(
            attempt=1,
            job_id="12_3",
            nodes=("n1",),
            world_size=2,
            start_step=40,
            start_time=1000.0,
            reason=reason,
            end_step=90,
            end_time=1000.0,
            detail="why\0",
            requeued_by="batch script",
        )
    ]
    assert not ledger.attempts()[-1].open


def test_no_ledger_is_no_attempt(tmp_path):
    ledger = Ledger(RunDirectory(tmp_path))
    assert ledger.attempts() == []
    assert ledger.last_claim() == 0


def test_the_first_end_counts(ledger):
    number = ledger.claim()
    ledger.end(number, reason=Reason.FAILED, step=7)
    ledger.end(number, reason=Reason.NODE_FAILURE, step=9)
    ends = [record for record in read_json_lines(ledger.directory.attempts) if record["event"] == "end"]
    assert len(ends) == 1
    assert [(attempt.reason, attempt.end_step) for attempt in ledger.attempts()] == [(Reason.FAILED, 7)]


def test_the_second_to_end_an_attempt_waits_for_the_first_record(ledger):
    ledger.claim()
    ledger.start(1, job_id=None, nodes=[], world_size=1, step=0)
    (ledger.directory.attempt(1) / "ended").touch()
    record = {"event": "end", "attempt": 1, "reason": "failed", "step": 7, "time": 3.0}
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(ledger.end, 1, reason=Reason.INFRASTRUCTURE, step=5)
        append_json_line(ledger.directory.attempts, record, durable=True)
        second.result()
    assert len(list(read_json_lines(ledger.directory.attempts))) == 2
    assert [(entry.reason, entry.end_step) for entry in ledger.attempts()] == [(Reason.FAILED, 7)]


def test_an_end_that_a_full_disk_refused_can_be_recorded_later(ledger):
    number = ledger.claim()
    ledger.start(number, job_id="12", nodes=["n1"], world_size=1, step=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            ledger.end(number, reason=Reason.TIME_LIMIT, step=80)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ledger.attempts()[-1].open
    ledger.end(number, reason=Reason.NODE_FAILURE, step=80)
    assert ledger.attempts()[-1].reason == Reason.NODE_FAILURE


def test_an_attempt_that_ended_before_its_ranks_began(ledger):
    number = ledger.claim()
    ledger.end(number, reason=Reason.CANCELLED, step=0)
    (attempt,) = ledger.attempts()
    assert (attempt.start_time, attempt.reason) == (None, Reason.CANCELLED)


def test_claims_count_up_and_the_last_one_owns(ledger):
    assert [ledger.claim() for _ in range(3)] == [1, 2, 3]
    assert ledger.last_claim() == 3
    assert [ledger.owns(attempt) for attempt in (1, 2, 3)] == [False, False, True]
    ledger.require_ownership(3)
    with pytest.raises(SupersededError, match=r"attempt 1 of .* was superseded by attempt 3"):
        ledger.require_ownership(1)


def test_a_run_directory_that_is_gone_cannot_be_claimed(tmp_path):
    with pytest.raises(RunDirectoryError, match="can't be claimed"):
        Ledger(RunDirectory(tmp_path / "absent")).claim()


@pytest.mark.parametrize(("module", "call"), [(Path, "iterdir"), (os, "fsync")])
def test_a_claim_that_the_file_system_refuses_leaves_nothing(ledger, monkeypatch, module, call):
    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(module, call, stale)
        with pytest.raises(RunDirectoryError, match=r"can't be claimed \(Stale"):
            ledger.claim()
    assert ledger.claim() == 1


def test_a_claim_whose_secret_cannot_be_written_leaves_nothing(ledger):
    """Else each retry on a full disk would make a further attempt, which counts as killed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # directories can be made, but nothing be written
    try:
        with pytest.raises(RunDirectoryError, match=r"can't be claimed \(File too large"):
            ledger.claim(secret=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(ledger.directory.claims.iterdir()) == []
    assert ledger.claim(secret=True) == 1
    assert len(read_secret(ledger.directory.attempt(1))) == 64


def test_a_claim_that_is_taken_back_after_the_next_one_was_made_leaves_no_gap(ledger, monkeypatch):
    """Else both the attempt before it and the one after it would own the run."""
    assert ledger.claim() == 1
    next_ones = []

    def refused(_):
        monkeypatch.undo()
        next_ones.append(ledger.claim())
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(RunDirectoryError, match="can't be claimed"):
        ledger.claim()
    assert next_ones == [3]
    assert [ledger.owns(number) for number in (1, 2, 3)] == [False, False, True]


def test_a_claim_that_is_taken_back_before_the_next_one_is_made_leaves_no_gap(ledger, monkeypatch):
    assert [ledger.claim() for _ in range(2)] == [1, 2]
    mkdir = Path.mkdir

    def late(path, *args, **kwargs):
        monkeypatch.undo()
        for file in (*ledger.directory.attempt(2).iterdir(),):
            file.unlink()
        ledger.directory.attempt(2).rmdir()
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", late)
    assert ledger.claim() == 3
    assert [ledger.owns(number) for number in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("secret", [False, True])
def test_a_claim_needs_no_hard_links(ledger, monkeypatch, secret):
    def refused(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    assert ledger.claim(secret=secret) == 1
    assert (ledger.directory.attempt(1) / "secret").exists() is secret


def test_no_two_claims_are_the_same(ledger):
    barrier = threading.Barrier(4)

    def claim_many(_):
        barrier.wait()
        return [ledger.claim() for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        numbers = [number for claimed in pool.map(claim_many, range(4)) for number in claimed]
    assert sorted(numbers) == list(range(1, 81))


def test_a_torn_start_leaves_the_other_attempts_readable(ledger):
    ledger.start(1, job_id="12", nodes=["n1"], world_size=1, step=0)
    with ledger.directory.attempts.open("a") as file:
        file.write('{"event": "end", "att')
    ledger.start(2, job_id="12", nodes=["n1"], world_size=1, step=30)
    assert [(attempt.attempt, attempt.start_step, attempt.open) for attempt in ledger.attempts()] == [
        (1, 0, True),
        (2, 30, True),
    ]


def test_a_second_start_of_an_attempt_changes_nothing(ledger):
    ledger.start(1, job_id="12", nodes=["n1"], world_size=1, step=0)
    ledger.start(1, job_id="99", nodes=["n9"], world_size=9, step=9)
    assert [(attempt.job_id, attempt.start_step) for attempt in ledger.attempts()] == [("12", 0)]


@pytest.mark.parametrize("fields", [{"reason": "meteorite", "detail": "a big one"}, {"detail": "a big one"}, {}])
def test_a_reason_that_only_a_later_version_knows_is_no_obstacle(ledger, fields):
    ledger.start(1, job_id="12", nodes=["n1"], world_size=1, step=0)
    append_json_line(ledger.directory.attempts, {"event": "end", "attempt": 1, "step": 7, "time": 1.0, **fields})
    (attempt,) = ledger.attempts()
    assert (attempt.reason, attempt.end_step) == (Reason.INTERRUPTED, 7)
    assert repr(fields.get("reason")) in attempt.detail
    assert fields.get("detail", "") in attempt.detail


def test_an_end_adds_to_what_the_start_recorded(ledger):
    number = ledger.claim()
    facts = StartFacts(total_steps=460, restart_count=1)
    ledger.start(number, facts, PhaseTimes(import_s=2.0), job_id=None, nodes=["n1"], world_size=1, step=0)
    (begun,) = ledger.attempts()
    assert (begun.total_steps, begun.restart_count, begun.import_s) == (460, 1, 2.0)
    ledger.end(number, EndFacts(requeued_by="slurm", exclude=("n1",)), reason=Reason.PREEMPTED, step=40)
    (ended,) = ledger.attempts()
    changes = {"reason": Reason.PREEMPTED, "end_step": 40, "end_time": ended.end_time}
    assert ended == replace(begun, requeued_by="slurm", exclude=("n1",), **changes)


def test_fields_that_only_a_later_version_knows_are_ignored(ledger):
    record = {"event": "start", "attempt": 1, "world_size": 1, "step": 0, "time": 1.0, "altitude": [3]}
    append_json_line(ledger.directory.attempts, record)
    assert ledger.attempts() == [Attempt(attempt=1, world_size=1, start_step=0, start_time=1.0)]


def test_null_stands_for_a_field_that_isnt_there(ledger):
    start = {"event": "start", "attempt": 1, "job_id": None, "nodes": None, "restart_count": None, "total_steps": None}
    end = {"event": "end", "attempt": 1, "reason": "hang", "saved_step": None, "suspects": None, "closed_late": None}
    for record in (start, end):
        append_json_line(ledger.directory.attempts, record)
    assert ledger.attempts() == [Attempt(attempt=1, reason=Reason.HANG)]


@pytest.mark.parametrize("record", [{}, {"event": "start"}, {"attempt": 3, "event": "start", "nodes": None}])
def test_a_record_without_all_fields_leaves_the_other_attempts_readable(ledger, record):
    number = ledger.claim()
    ledger.start(number, job_id="7", nodes=["n1"], world_size=1, step=0)
    append_json_line(ledger.directory.attempts, record)
    assert ledger.attempts()[0].job_id == "7"
