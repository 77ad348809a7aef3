"""Saves of a run: those that fail, those of the best evaluations, and the removal of older ones."""

from __future__ import annotations

import os
import re

import pytest

from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from tests.support.full_disk import small_disk

PREEMPTED = """#!/bin/sh
test "$1" = show || exit 1
touch {gate}
now=$(date +%s)
echo "JobId=7 JobName=run
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Requeue=1 Restarts=0 ExitCode=0:0 TimeLimit=01:00:00
   SubmitTime=$now EligibleTime=$now StartTime=$now EndTime=$((now + 1)) PreemptTime=$now Partition=low"
"""
"""SLURM's record of a job that it kills in a second; reading it unblocks the disk."""
WORDS = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    "data.num_workers=0",
    "logger.tensorboard=false",
    "checkpoint.every_min=null",
    "trainer.global_batch_size=8",
)
ENDLESS = ("trainer.max_steps=100000", "trainer.max_epochs=null", "trainer.eval_every_steps=100000")
REFUSING = (*WORDS, "task._target_=tests.multiprocess.programs.refusing.Refusing", "checkpoint.every_steps=1")


@pytest.fixture
def refusing(train, tmp_path):
    """A run whose file system refuses checkpoints from its `begin`-th loss until its `end`-th."""

    def run(*words, world_size, begin, end=0, gone=False, **variables):
        task = {"checkpoints": tmp_path / "run" / "checkpoints", "begin": begin, "end": end, "gone": gone}
        options = [f"+task.{name}={value}" for name, value in task.items()]
        return train("run", *REFUSING, *options, *words, world_size=world_size, **variables)

    return run


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_failed_write_ends_all_ranks(refusing, tmp_path, asynchronous):
    """Every rank reports it; none waits for a collective that never comes."""
    code, run, output = refusing(
        f"checkpoint.asynchronous={asynchronous}", "trainer.max_steps=400", world_size=2, begin=4, TRIAL_SLEEP="0.01"
    )
    assert code == 1
    assert "can't be written to" in output
    records = read_exit_records(run.directory.attempt(1))
    assert "can't be written to" in records[0].message
    assert "rank zero could not write" in records[1].message
    assert [info.intact for info in list_checkpoints(run.directory)] == []
    (tmp_path / "run" / "checkpoints").unlink()
    (tmp_path / "run" / "aside").rename(tmp_path / "run" / "checkpoints")
    # what was there before is as it was
    assert set(run.steps) <= {1, 2, 3}
    assert run.steps


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_where_the_policy_allows_training_goes_on(train, refusing, asynchronous):
    words = ["trainer.max_steps=24", "checkpoint.on_error=warn", f"checkpoint.asynchronous={asynchronous}"]
    code, straight, _ = train("straight", *WORDS, "trainer.max_steps=24", world_size=2)
    assert code == 0
    code, run, output = refusing(*words, world_size=2, begin=4, end=18, TRIAL_SLEEP="0.02")
    assert code == 0, output
    assert "can't be written to" in output
    assert (run.digest, run.metrics) == (straight.digest, straight.metrics)
    assert run.steps[-1] == 24


def test_the_end_of_a_run_needs_its_checkpoint(refusing):
    code, _, output = refusing("trainer.max_steps=5", "checkpoint.on_error=warn", world_size=2, begin=3)
    assert code == 1
    assert "can't be written to" in output


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("files", [18, 22, 26, 30, 40])
def test_an_attempt_without_files_has_an_end(train, tmp_path, world_size, files):
    """Wherever its file system runs out of them: before the ranks begin, in a log, in a save."""
    (tmp_path / "disk").mkdir()
    words = ("trainer.max_steps=60", "checkpoint.every_steps=1", "checkpoint.keep=60")
    with small_disk(tmp_path / "disk", f"size=64m,nr_inodes={files}"):
        code, run, output = train("disk/run", *WORDS, *words, world_size=world_size)
        ledger = Ledger(run.directory)
        assert "disk is out of files: " in output
        assert code == (1 if ledger.last_claim() else 2)
        attempts = ledger.attempts()
        assert [one.attempt for one in attempts] == list(range(1, ledger.last_claim() + 1))
        assert all(one.reason is Reason.FAILED for one in attempts)
        assert all("out of files" in one.detail or "No space left" in one.detail for one in attempts)
        assert not any(path.name.startswith("room") for path in run.directory.claims.glob("*/*"))


def test_an_error_without_a_message_counts_as_well(train):
    words = ["task._target_=tests.multiprocess.programs.unsaveable.WithUnsaveable", "trainer.max_steps=3"]
    code, run, output = train("run", *WORDS, *words, world_size=2)
    assert code == 1, output
    records = read_exit_records(run.directory.attempt(1))
    assert records[0].message.endswith(": MemoryError: ")
    assert "rank zero could not write the checkpoint of step 3: MemoryError()" in records[1].message


def test_a_folder_that_was_removed_is_made_again(refusing):
    words = ["trainer.max_steps=8", "checkpoint.keep=9", "checkpoint.asynchronous=false"]
    code, run, output = refusing(*words, world_size=2, begin=5, gone=True)
    assert code == 0, output
    assert "was removed" in output
    assert run.steps == [5, 6, 7, 8]


@pytest.mark.nightly
def test_the_best_evaluations_are_saved_and_kept(train):
    """No other save is due; an interrupted run keeps the same ones."""
    words = [*WORDS, "trainer.max_steps=24", "trainer.eval_every_steps=3", "checkpoint.keep_best=2", "optimizer.lr=0.3"]
    code, straight, output = train("straight", *words)
    assert code == 0, output
    values = {entry["step"]: entry["eval/loss"] for entry in straight.metrics if "eval/loss" in entry}
    best = sorted(values, key=lambda step: (values[step], step))[:2]
    assert sorted({*best, 24}) == sorted({*best, *straight.steps[-1:]})
    assert set(best) <= set(straight.steps)
    scores = {info.step: info.score for info in list_checkpoints(straight.directory)}
    assert {step: scores[step].value for step in best} == {step: values[step] for step in best}
    for act in ("0:4:SIGTERM", "0:5:SIGTERM", "0:3:SIGTERM", ""):
        code, run, output = train("run", *words, TRIAL_ACT=act)
        assert code == (4 if act else 0), output
    assert set(best) <= set(run.steps)
    assert run.metrics == straight.metrics
    assert {info.step: info.score for info in list_checkpoints(run.directory) if info.step in best} == {
        step: scores[step] for step in best
    }


def test_saves_by_time_go_by_rank_zeros_clock(train):
    """No other rank knows what a save costs, and therefore when the next one is due."""
    words = [
        "task._target_=tests.multiprocess.programs.saves_early.SavesEarly",
        "checkpoint.auto=true",
        "checkpoint.asynchronous=false",
    ]
    words += ["checkpoint.keep=9", "checkpoint.keep_best=0"]
    code, run, output = train("run", *WORDS, *words, "trainer.max_steps=12", world_size=2)
    assert code == 0, output
    assert output.count("a save every") == 2
    assert run.steps == [2, 12]


def test_a_metric_that_is_not_evaluated_is_one_line(train):
    code, _, output = train(
        "run", *WORDS, "checkpoint.keep_best=1", "checkpoint.metric=f1", "checkpoint.metric_mode=max"
    )
    assert code == 1
    assert "checkpoint.metric=f1: the evaluation returns loss; name one of these" in output


def test_a_stop_leaves_older_ones_and_a_start_clears_them_and_what_is_half_done(train):
    words = [*WORDS, "trainer.max_steps=6", "checkpoint.every_steps=1", "checkpoint.asynchronous=false"]
    code, run, _ = train("run", *words, TRIAL_ACT="0:4:SIGTERM")
    assert (code, run.steps) == (4, [2, 3, 4])
    (run.directory.checkpoints / ".tmp-step_00000005-0123abcd").mkdir()
    run.directory.checkpoint(4).rename(run.directory.checkpoints / ".tmp-replaced-step_00000004-0123abcd")
    code, run, output = train("run", *words)
    assert code == 0, output
    assert "cleaned up after an earlier attempt: .tmp-replaced-step_00000004" in output
    assert "resuming at step 4" in output
    assert run.steps == [5, 6]
    assert [path.name for path in run.directory.checkpoints.glob(".*")] == []


@pytest.mark.parametrize("at", ["build_model", "eval_dataset"])
def test_an_attempt_that_is_overtaken_while_it_starts_takes_nothing_from_the_newer_one(train, tmp_path, at):
    words = [
        *WORDS,
        "task._target_=tests.multiprocess.programs.overtaken.Overtaken",
        f"+task.run={tmp_path / 'run'}",
        f"+task.at={at}",
    ]
    code, run, output = train("run", *words, "trainer.max_steps=3")
    assert code == 4, output
    assert "superseded by attempt 2" in output
    assert [record["step"] for record in run.metrics] == [5]
    assert [path.name for path in run.directory.checkpoints.iterdir()] == [".tmp-step_00000005-0123abcd"]


def test_a_checkpoint_that_is_being_written_when_a_rank_fails_is_finished(train, tmp_path):
    """Rank zero has all of it in memory; here the disk blocks until rank zero's exit record is written."""
    exit_record = tmp_path / "run" / "attempts" / "0001" / "rank_0.json"
    words = [
        *WORDS,
        "task._target_=tests.multiprocess.programs.slow_disk.SlowDisk",
        "checkpoint.every_steps=2",
        "trainer.max_steps=3",
    ]
    disk = {"DISK_GATE": str(exit_record), "DISK_WRITES": str(tmp_path / "writes")}
    code, run, output = train("run", *words, world_size=2, TRIAL_ACT="0:3:raise", **disk)
    assert code == 1, output
    assert exit_record.exists()
    assert run.steps == [2]


def test_a_save_that_takes_longer_than_there_is_time_is_not_begun(train, tmp_path):
    """The copy stops training only for a moment, but the write in the background has to end before the kill."""
    gate, scontrol = tmp_path / "gate", tmp_path / "scontrol"
    scontrol.write_text(PREEMPTED.format(gate=gate))
    scontrol.chmod(0o755)
    disk = {"DISK_GATE": str(gate), "DISK_WRITES": str(tmp_path / "writes")}
    slurm = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [
        *WORDS,
        "task._target_=tests.multiprocess.programs.slow_disk.SlowDisk",
        "checkpoint.every_steps=2",
        *ENDLESS,
    ]
    acts = {"TRIAL_ACT": "0:20:SIGTERM", "TRIAL_SLEEP": "0.05"}
    code, run, output = train("run", *words, world_size=2, **acts, **disk, **slurm)
    assert code == 4, output
    assert "stopping: preempted" in output
    assert re.search(r"skipping the save: \S+ s are left, and it may take \S+ s", output)
    assert run.steps == [2]
