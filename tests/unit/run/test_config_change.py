from __future__ import annotations

import os

import pytest

from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.files import write_json
from hpctrain.run.config_change import change_config, changed_values, keep_config, revert_config, trained_varied
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.scheduler.slurm import Slurm


def files(directory):
    return {path.name: path.read_text() for path in directory.path.iterdir() if path.is_file()}


def change(directory):
    directory.config.write_text("lr: 1\n")
    os.utime(directory.config, (50, 50))
    change_config(directory, "lr: 2\n")


def test_the_first_configuration_changes_nothing(directory):
    change_config(directory, "lr: 1\n")
    assert files(directory) == {"config.yaml": "lr: 1\n"}
    assert not revert_config(directory)


def test_a_change_is_taken_back_with_its_time(directory):
    change(directory)
    assert revert_config(directory)
    assert files(directory) == {"config.yaml": "lr: 1\n"}
    assert directory.config.stat().st_mtime == 50
    assert not revert_config(directory)


def test_the_same_configuration_is_no_change(directory):
    change(directory)
    keep_config(directory)
    change_config(directory, "lr: 2\n")
    assert files(directory) == {"config.yaml": "lr: 2\n"}


def test_a_second_change_before_an_attempt_began_goes_back_to_the_last_that_worked(directory):
    change(directory)
    change_config(directory, "lr: 3\n")
    assert revert_config(directory)
    assert files(directory) == {"config.yaml": "lr: 1\n"}


def test_a_change_stays_once_an_attempt_has_begun(directory):
    change(directory)
    keep_config(directory)
    assert not revert_config(directory)
    assert files(directory) == {"config.yaml": "lr: 2\n"}


@pytest.mark.parametrize(
    ("reason", "began", "ends_run", "lr"),
    [
        (Reason.FAILED, "", True, 1),
        (Reason.OUT_OF_MEMORY, "", True, 1),
        (Reason.STALLED, "", True, 1),
        (Reason.FAILED, "start", True, 1),
        (Reason.FAILED, "start, training", True, 2),
        (Reason.OUT_OF_MEMORY, "", False, 2),
        (Reason.PREEMPTED, "start", False, 2),
        (Reason.INTERRUPTED, "start", True, 2),
    ],
)
def test_a_run_that_ends_before_its_attempt_trained_takes_it_back(directory, reason, began, ends_run, lr):
    ledger = Ledger(directory)
    change(directory)
    attempt = ledger.claim()
    if "start" in began:
        ledger.start(attempt, job_id=None, nodes=[], world_size=1, step=0)
    if "training" in began:
        keep_config(directory)
    record_end(directory, attempt, Outcome(reason, 0), world_size=1, ends_run=ends_run)
    assert directory.config.read_text() == f"lr: {lr}\n"


@pytest.mark.parametrize(
    ("before", "change", "earlier", "left"),
    [
        ("seed: 1\n", "seed: 2\n", Reason.COMPLETED, "seed: 1\n"),
        ("seed: 1\n", "seed: 2\n", Reason.INTERRUPTED, "seed: 1\n"),
        ("nodes: 2\n", "nodes: 1\n", Reason.COMPLETED, "nodes: 2\n"),
        ("nodes: 2\n", "nodes: 1\n", Reason.INTERRUPTED, "nodes: 1\n"),  # as a run that was made shorter
    ],
)
def test_a_run_that_completes_without_a_step_keeps_what_it_was_trained_with(directory, before, change, earlier, left):
    ledger = Ledger(directory)
    record_end(directory, ledger.claim(), Outcome(earlier, 5), world_size=1, ends_run=True)
    directory.config.write_text(before)
    change_config(directory, change)
    record_end(directory, ledger.claim(), Outcome(Reason.COMPLETED, 5), world_size=1, ends_run=True)
    assert files(directory).keys() == {"config.yaml", "attempts.jsonl"}
    assert directory.config.read_text() == left


def test_the_values_of_earlier_steps_are_recorded(directory):
    write_json(directory.manifest, {"varied": {"seed": "1", "optimizer": "sgd", "nodes": "1"}})
    directory.config.write_text("seed: 1\nnodes: 1\nrun_mode: '0750'\noptimizer: {lr: 0.1}\n")
    for step, seed, lr in ((10, 2, 0.1), (20, 3, 0.2), (10, 4, 0.3)):  # the third begins before the second
        change_config(directory, f"seed: {seed}\nnodes: 2\nrun_mode: '0700'\noptimizer: {{lr: {lr}}}\n")
        keep_config(directory, step)
    seed, nodes = "1 until step 10, then 4", "1 until step 10, then 2"
    lr = "0.1 until step 10, then 0.3"
    assert changed_values(directory) == {"seed": seed, "nodes": nodes, "optimizer.lr": lr}
    assert trained_varied(directory) == {"seed": seed, "optimizer": "sgd (changed)", "nodes": nodes}


def test_a_change_before_the_first_step_leaves_one_value(directory):
    write_json(directory.manifest, {"varied": {"seed": "1"}})
    directory.config.write_text("seed: 1\n")
    change_config(directory, "seed: 2\n")
    keep_config(directory, 0)
    assert (changed_values(directory), trained_varied(directory)) == ({}, {"seed": "2"})
    change_config(directory, "seed: 3\n")
    keep_config(directory)  # a program that reports no steps
    assert changed_values(directory) == {"seed": "2, then 3"}


def test_steps_before_a_change_that_are_repeated_have_the_values_after_it(directory):
    write_json(directory.manifest, {"varied": {"seed": "1"}})
    directory.config.write_text("seed: 1\ntrainer: {clip_grad_norm: 1.0}\n")
    change_config(directory, "seed: 2\ntrainer: {clip_grad_norm: null}\n")
    keep_config(directory, 20)
    for step, seed in ((30, "1 until step 20, then 2"), (16, "1 until step 16, then 2"), (0, "2")):
        keep_config(directory, step)  # an attempt without a change
        assert trained_varied(directory) == {"seed": seed}
    assert changed_values(directory) == {}


def test_an_attempt_that_is_closed_late_leaves_the_change_of_the_resume_that_closes_it(directory, slurm):
    change(directory)
    claim = directory.attempt(Ledger(directory).claim())
    ExitRecord(rank=0, host="n1", reason=Reason.FAILED, step=0, message="no").write(claim)
    change_config(directory, "lr: 3\n")
    UnrecordedEnds(directory, Slurm(slurm.environ, run=slurm.run)).close(1)
    assert Ledger(directory).attempts()[0].reason is Reason.FAILED
    assert directory.config.read_text() == "lr: 3\n"


def test_a_change_that_the_disk_has_no_room_for_leaves_the_run_as_it_was(directory, file_size_limit):
    directory.config.write_text("lr: 1\n" * 100)
    before = files(directory)
    with file_size_limit(100), pytest.raises(OSError, match="File too large"):
        change_config(directory, "lr: 2\n")
    assert files(directory) == before


def test_a_change_that_cannot_be_taken_back_at_once_is_taken_back_later(directory):
    ledger = Ledger(directory)
    change(directory)
    attempt = ledger.claim()
    directory.config.rename(directory.path / "elsewhere")
    directory.config.mkdir()  # as a file system may answer for a while: it can't be read
    with pytest.raises(OSError, match="not a regular file"):
        record_end(directory, attempt, Outcome(Reason.FAILED, 0), world_size=1, ends_run=True)
    directory.config.rmdir()
    (directory.path / "elsewhere").rename(directory.config)
    record_end(directory, attempt, Outcome(Reason.FAILED, 0), world_size=1, ends_run=True)
    assert directory.config.read_text() == "lr: 1\n"
    assert not ledger.attempt(attempt).open
