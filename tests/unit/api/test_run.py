from __future__ import annotations

import json
import math
import shutil
import sys
import time

import pytest

import hpctrain
from hpctrain.config.compose import Composer
from hpctrain.config.stored import to_yaml
from hpctrain.errors import HpctrainError, RunDirectoryError, RunFailedError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A run in runs/mine, where its name alone finds it."""
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.at("runs/mine")
    directory.create(0o750)
    directory.config.write_text(to_yaml(Composer().compose(["run_dir=runs/mine", "name=mine", "trainer.max_steps=9"])))
    return directory


def end(directory, reason, step=4, job_id=None):
    ledger = Ledger(directory)
    number = ledger.claim()
    ledger.start(number, job_id=job_id, nodes=["n1"], world_size=1, step=0)
    ledger.end(number, reason=reason, step=step, detail="the reason")
    return number


def test_a_run_is_found_by_its_path_and_by_its_name(directory):
    by_name, by_path = hpctrain.Run("mine"), hpctrain.Run(directory.path, runs_dir="elsewhere")
    assert by_name.path == by_path.path == directory.path
    assert repr(by_name) == f"Run('{directory.path}')"
    assert (by_name.config.name, by_name.config.trainer.max_steps) == ("mine", 9)
    with pytest.raises(RunDirectoryError, match="absent: no such path"):
        hpctrain.Run("absent")


def test_metrics_are_records_with_their_nan(directory):
    lines = [{"step": 2, "time": 5.0, "train/loss": None, "nonfinite": {"train/loss": "nan"}}, {"step": 4, "lr": 0.1}]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = hpctrain.Run("mine").metrics()
    assert math.isnan(first.pop("train/loss"))
    assert (first, second) == ({"step": 2, "time": 5.0}, {"step": 4, "lr": 0.1})


def test_a_frame_needs_pandas(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(HpctrainError, match=r"pip install \"hpctrain\[frames\]"):
        hpctrain.Run("mine").metrics(as_frame=True)


@pytest.mark.nightly
def test_a_frame_has_a_row_per_record(directory):
    pytest.importorskip("pandas")
    directory.metrics.write_text('{"step": 2, "train/loss": 0.5}\n{"step": 4, "eval/loss": 0.25}\n')
    frame = hpctrain.Run("mine").metrics(as_frame=True)
    assert frame["step"].tolist() == [2, 4]
    assert frame["eval/loss"].dropna().tolist() == [0.25]


def test_a_completed_run_is_waited_for(directory):
    end(directory, Reason.COMPLETED, step=9)
    status = hpctrain.Run("mine").wait()
    assert (status.state, status.step, status.name) == ("completed", 9, "mine")


def test_a_run_that_is_over_needs_no_time_to_settle_and_the_bound_holds(directory, monkeypatch):
    pauses, sleep = [], time.sleep
    monkeypatch.setattr("hpctrain.api.run.time.sleep", lambda s: (pauses.append(s), sleep(s)))
    end(directory, Reason.COMPLETED, step=9)
    assert hpctrain.Run("mine").wait(0).state == "completed"
    assert hpctrain.Run("mine").wait(0.01).state == "completed"
    assert max(pauses, default=0) <= 0.01  # none if reading the run took longer


def test_a_failed_run_raises_its_error(directory):
    number = end(directory, Reason.FAILED)
    ExitRecord(
        rank=0, host="n1", reason=Reason.FAILED, step=4, message="no", traceback="Traceback: no", time=1.0
    ).write(directory.attempt(number))
    run = hpctrain.Run("mine")
    with pytest.raises(RunFailedError, match=r"is failed \(the reason\), at step 4\nTraceback: no"):
        run.wait()
    assert run.wait(check=False).state == run.state == "failed"


def test_waiting_has_a_bound_and_needs_a_run_that_was_started(directory, slurm):
    run = hpctrain.Run("mine")
    with pytest.raises(RunDirectoryError, match=r"has not been started: call hpctrain.submit or resume\(\) first"):
        run.wait()
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    slurm.queue(j12={"State": "PENDING", "Reason": "Resources"})
    with pytest.raises(TimeoutError, match=r"is queued .* after 0 s"):
        run.wait(0)
    assert run.cancel() == "cancelled job 12, which was pending"
    assert slurm.cancelled == ["12"]
    assert run.state == "cancelled"


def test_a_run_that_was_removed_meanwhile_is_not_there(directory):
    run = hpctrain.Run("mine")
    shutil.rmtree(directory.path)
    for look in (run.status, run.wait):
        with pytest.raises(RunDirectoryError, match="mine is not a run directory: no such directory"):
            look()


def test_a_refusal_of_slurm_is_logged_and_not_printed(directory, slurm, caplog, capsys):
    JobRecords(directory).add({"job_id": "12", "time": 1.0})
    slurm.script("squeue", "echo slurm_load_jobs error: Access denied >&2; exit 1")
    assert hpctrain.Run("mine").state == "unknown"
    assert "Access denied" in caplog.text
    assert capsys.readouterr() == ("", "")


def test_a_notebook_shows_the_state(directory):
    end(directory, Reason.COMPLETED, step=9)

    class Printer:
        shown = ""

        def text(self, text):
            self.shown += text

    printer = Printer()
    hpctrain.Run("mine")._repr_pretty_(printer, False)
    assert printer.shown == f"Run('{directory.path}'): completed (the reason), step 9/9"


def test_a_dry_run_is_for_the_command():
    for launch in (hpctrain.submit, hpctrain.fit):
        with pytest.raises(hpctrain.ConfigError, match=r"cluster\.dry_run=true: launches nothing"):
            launch(hpctrain.compose(["cluster.dry_run=true"]))


def test_the_package_shows_its_names_and_no_others():
    assert {"compose", "submit", "fit", "Run"} <= set(dir(hpctrain))
    with pytest.raises(AttributeError, match="module 'hpctrain' has no attribute 'launch_it'"):
        _ = hpctrain.launch_it
