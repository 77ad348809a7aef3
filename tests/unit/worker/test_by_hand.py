"""Ranks that were started by hand, with a scontrol that does as it is told."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.worker.by_hand import close_by_hand, close_silent_by_hand

SCONTROL = f"""#!{sys.executable} -SE
import os, sys
home = os.path.dirname(sys.argv[0])
open(home + "/asked", "a").write(" ".join(sys.argv[1:]) + "\\n")
if len(open(home + "/asked").readlines()) <= int(open(home + "/silent").read()):
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
if "show" in sys.argv:
    print(open(home + "/job").read())
"""
CAPTURED = (Path(__file__).parents[1] / "attempt" / "captured" / "stops.txt").read_text()
STOPS = dict(re.findall(r"=== (\w+) [^\n]*\n(.*?)(?=\n=== |\Z)", CAPTURED, re.DOTALL))


@pytest.fixture(scope="module")
def config():
    return Composer().compose(["cluster=slurm"])


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """What scontrol was asked; as often as `silent` says, nobody answers it at first."""
    path = tmp_path / "bin" / "scontrol"
    path.parent.mkdir()
    path.write_text(SCONTROL)
    path.chmod(0o755)
    path.with_name("silent").write_text("0")
    path.with_name("job").write_text(STOPS["preempted"])
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path.with_name("asked")


def test_a_controller_that_is_silent_for_a_moment_costs_no_run(directory, config, scontrol):
    environment = ClusterEnvironment.from_environment({"SLURM_JOB_ID": "7"})
    ledger = Ledger(directory)
    told = {"step": 14, "detail": "", "environment": environment, "config": config}
    scontrol.with_name("silent").write_text("2")
    close_by_hand(directory, ledger.claim(), reason=Reason.PREEMPTED, **told)
    assert scontrol.read_text().splitlines() == ["show job 7"] * 3 + ["requeue 7"]
    assert [entry.reason for entry in ledger.attempts()] == [Reason.PREEMPTED]


def close(directory, config, reason, **told):
    """Close a new attempt of job 7 by hand, and tell what the ledger holds of it."""
    environment = ClusterEnvironment.from_environment({"SLURM_JOB_ID": "7"})
    ledger = Ledger(directory)
    told = {"step": 14, "detail": "said", "environment": environment, "config": config} | told
    close_by_hand(directory, ledger.claim(), reason=reason, **told)
    return ledger.attempts()[-1]


def test_the_ledger_tells_who_requeues(directory, config, scontrol):
    end = close(directory, config, Reason.PREEMPTED)
    assert (end.extra["next"], end.extra["requeued_by"], end.detail) == ("requeue", "hpctrain", "said")
    failed = close(directory, config, Reason.FAILED)
    assert (failed.reason, failed.detail, failed.extra.get("next")) == (Reason.FAILED, "said", None)


@pytest.mark.parametrize(
    ("stop", "number", "reasons"),
    [
        ("preempted", signal.SIGTERM, [Reason.PREEMPTED, Reason.FAILED]),
        ("time_limit_near", signal.SIGUSR2, [Reason.TIME_LIMIT, Reason.FAILED]),
        ("peer_died", signal.SIGTERM, [Reason.FAILED, Reason.FAILED]),
        ("preempted", None, [Reason.FAILED, Reason.FAILED]),
    ],
)
def test_an_error_after_a_signal_may_be_that_of_a_child_process_once(
    directory, config, scontrol, stop, number, reasons
):
    record = re.sub(r" EndTime=\d+", f" EndTime={int(time.time()) + 90}", STOPS[stop])
    scontrol.with_name("job").write_text(record)
    ends = [close(directory, config, Reason.FAILED, stop_signal=number) for _ in range(2)]
    assert [end.reason for end in ends] == reasons
    asked = scontrol.read_text() if scontrol.exists() else ""
    assert asked.count("requeue 7") == len(set(reasons)) - 1


def test_the_ledger_tells_of_a_run_that_is_given_up(directory, config, scontrol):
    first = close(directory, config, Reason.TIME_LIMIT)
    second = close(directory, config, Reason.TIME_LIMIT)
    assert (first.reason, first.extra["next"]) == (Reason.TIME_LIMIT, "requeue")
    assert (second.reason, second.extra.get("next")) == (Reason.STALLED, None)
    assert "2 attempts in a row gained no step" in second.detail
    assert scontrol.read_text().count("requeue 7") == 1


@pytest.mark.parametrize(
    ("stop", "reason", "requeued"),
    [
        ("cancelled", Reason.CANCELLED, 0),
        ("time_limit_near", Reason.TIME_LIMIT, 1),
        ("time_limit_over", Reason.TIME_LIMIT, 1),
        ("preempted_cancel_without_grace", Reason.TIME_LIMIT, 1),
    ],
)
def test_a_job_that_its_user_cancels_while_the_ranks_save_is_not_revived(
    directory, config, scontrol, stop, reason, requeued
):
    scontrol.with_name("job").write_text(STOPS[stop])
    end = close(directory, config, Reason.TIME_LIMIT)
    assert (end.reason, "next" in end.extra) == (reason, bool(requeued))
    assert scontrol.read_text().count("requeue 7") == requeued


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ("preempted", Reason.PREEMPTED),
        ("preempted_cancel_without_grace", Reason.PREEMPTED),
        ("cancelled", Reason.CANCELLED),
        ("goes_on", Reason.INTERRUPTED),
    ],
)
def test_a_controller_that_had_no_answer_before_the_save_is_asked_after_it(directory, config, scontrol, stop, reason):
    goes_on = re.sub(r" EndTime=\d+", f" EndTime={int(time.time()) + 86_400}", STOPS["peer_died"])
    scontrol.with_name("job").write_text(STOPS.get(stop, goes_on))
    end = close(directory, config, Reason.INTERRUPTED, detail="")
    requeued = reason is Reason.PREEMPTED
    assert (end.reason, end.extra.get("next")) == (reason, "requeue" if requeued else None)
    assert scontrol.read_text().count("requeue 7") == requeued


def test_a_second_ctrl_c_asks_nobody(directory, config, scontrol):
    assert close(directory, config, Reason.INTERRUPTED, detail="a second Ctrl-C").reason is Reason.INTERRUPTED
    assert not scontrol.exists()


def test_an_end_that_another_rank_recorded_first_is_the_one_that_counts(directory, config, scontrol):
    ledger = Ledger(directory)
    ledger.start(ledger.claim(), job_id="7", nodes=["n1"], world_size=2, step=0)
    ledger.end(1, reason=Reason.FAILED, step=9)
    environment = ClusterEnvironment.from_environment({"SLURM_JOB_ID": "7"})
    told = {"step": 14, "detail": "", "environment": environment, "config": config}
    close_by_hand(directory, 1, reason=Reason.PREEMPTED, **told)
    assert [entry.reason for entry in ledger.attempts()] == [Reason.FAILED]
    assert "requeue 7" not in (scontrol.read_text() if scontrol.exists() else "")


@pytest.mark.parametrize(
    ("left", "blames_peer", "reason", "step"),
    [
        (None, False, Reason.NODE_FAILURE, 0),
        (Reason.INFRASTRUCTURE, True, Reason.NODE_FAILURE, 9),
        (Reason.HANG, True, Reason.HANG, 9),
        (Reason.FAILED, False, Reason.FAILED, 9),
        (Reason.PREEMPTED, False, Reason.PREEMPTED, 9),
        (Reason.COMPLETED, False, Reason.NODE_FAILURE, 9),
    ],
)
def test_an_attempt_that_nobody_closed_is_judged_by_what_its_ranks_left(directory, left, blames_peer, reason, step):
    environment = ClusterEnvironment.from_environment({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    ledger = Ledger(directory)
    ledger.start(ledger.claim(), job_id="7", nodes=["n1", "n2"], world_size=2, step=0)
    if left is not None:
        record = ExitRecord(rank=1, host="n2", reason=left, step=9, message="what it said", blames_peer=blames_peer)
        record.write(directory.claim(1))
    close_silent_by_hand(directory, environment)
    (closed,) = ledger.attempts()
    assert (closed.reason, closed.end_step) == (reason, step)
