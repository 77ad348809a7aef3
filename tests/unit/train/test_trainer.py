from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal

import pytest
import torch
from torch.utils.data import Dataset

from hpctrain.checkpoint.read import load
from hpctrain.errors import CheckpointError, ConfigError, SupersededError, TaskError
from hpctrain.files import read_json_lines
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import allow_start_over
from hpctrain.run.ledger import Ledger
from tests.unit.train import small_task


def records(directory):
    return [json.loads(line) for line in directory.metrics.read_text().splitlines()]


def weights(directory, step):
    return load(directory.checkpoint(step)).model


def test_it_trains_evaluates_and_saves_at_the_configured_steps(attempt, directory):
    trainer, starts = attempt("checkpoint.keep_best=0"), []
    assert trainer.run(lambda running: starts.append((running.step, running.training.total_steps)))
    assert starts == [(0, 10)]
    assert trainer.step == 10
    found = records(directory)
    assert [record["step"] for record in found if "train/loss" in record] == [3, 6, 9, 10]
    assert [record["step"] for record in found if "eval/loss" in record] == [4, 8, 10]
    assert [info.step for info in list_checkpoints(directory)] == [5, 10]


def test_the_best_evaluation_is_kept_unless_configured_otherwise(attempt, directory, tmp_path):
    words = ("optimizer.lr=0.3", "trainer.eval_every_steps=1", "checkpoint.every_steps=null")
    assert attempt(*words).run()
    evaluated = {record["step"]: record["eval/loss"] for record in records(directory) if "eval/loss" in record}
    best = min(evaluated, key=evaluated.get)
    assert best < 9
    assert best in [info.step for info in list_checkpoints(directory)]
    kept = weights(directory, 10)
    directory.path.rename(tmp_path / "kept")
    directory.create(0o750)
    assert attempt(*words, "checkpoint.keep_best=0").run()
    assert [info.step for info in list_checkpoints(directory)] == [10]
    assert all(torch.equal(value, kept[name]) for name, value in weights(directory, 10).items())


@pytest.mark.parametrize("words", [("+task.eval_samples=0",), ("checkpoint.metric=f1", "trainer.sanity_batches=0")])
def test_where_no_metric_is_judged_there_is_no_best_to_keep(attempt, directory, words):
    trainer = attempt(*words)
    assert trainer.run()
    assert trainer.training.checkpoint_policy.keep_best == 0
    assert [info.step for info in list_checkpoints(directory)] == [5, 10]


def test_a_resume_warns_that_a_checkpoint_is_gone_and_uses_an_older_one(attempt, directory, caplog):
    assert attempt("checkpoint.keep_best=0").run()
    straight = weights(directory, 10)
    logged = directory.metrics.read_bytes()
    shutil.rmtree(directory.checkpoint(10))
    assert attempt("checkpoint.keep_best=0").run()
    assert f"the checkpoint of step 10, which the run saved, is gone: using {directory.checkpoint(5)}" in caplog.text
    assert (directory.earlier / "0002" / "metrics.jsonl").read_bytes() == logged
    assert all(torch.equal(value, straight[name]) for name, value in weights(directory, 10).items())


def test_a_resume_without_any_checkpoint_is_refused_and_may_start_over_once(attempt, directory, caplog):
    assert attempt("checkpoint.keep_best=0").run()
    straight, logged = weights(directory, 10), directory.metrics.read_bytes()
    for step in (5, 10):
        shutil.rmtree(directory.checkpoint(step))
    with pytest.raises(CheckpointError, match="expected the checkpoint of step 10, which the run saved"):
        attempt().run()
    assert directory.metrics.read_bytes() == logged
    allow_start_over(directory, 2)
    again = attempt("checkpoint.keep_best=0", "+task.signal_in=loss", "+task.signal_at=13")
    assert again.resume().step == 0
    assert "starting from step 0; the metrics so far are in " in caplog.text
    assert (directory.earlier / "0003" / "metrics.jsonl").read_bytes() == logged
    assert not again.run()
    again = attempt("checkpoint.keep_best=0")
    assert again.resume().step == 7
    assert again.run()
    assert all(torch.equal(value, straight[name]) for name, value in weights(directory, 10).items())
    for step in directory.checkpoint_steps():
        shutil.rmtree(directory.checkpoint(step))
    with pytest.raises(CheckpointError, match="expected the checkpoint of step 10"):
        attempt().run()


def test_damaged_checkpoints_are_set_aside_when_a_run_starts_over(attempt, directory):
    assert attempt().run()
    for info in list_checkpoints(directory):
        (info.path / "model.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint of the run is intact: .*resume\.from_scratch=true"):
        attempt().run()
    allow_start_over(directory, 2)
    assert attempt().resume().step == 0
    assert len(directory.set_aside()) == 2
    assert directory.checkpoint_steps() == []


class Interrupting(Dataset):
    """Samples that draw; while the one of this number is read, a signal arrives."""

    def __init__(self, tensors):
        self.tensors, self.number, self.finished = tensors, 0, False

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, index):
        features = self.tensors[0][index] + torch.rand(4)
        self.number -= 1
        if self.number == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            self.finished = True
        return features, self.tensors[1][index]


def test_a_stop_while_samples_are_read_ends_with_the_same_weights(attempt, tmp_path, directory, monkeypatch):
    data = Interrupting(small_task.Small()._samples(24, 1).tensors)
    monkeypatch.setattr(small_task.Small, "train_dataset", lambda task: data)
    data.number = 1
    assert not attempt().run()
    assert list_checkpoints(directory) == [], "nothing is new"
    assert not data.finished, "the handler interrupts the read"
    per_step = 24 // attempt().resume().training.data.plan.steps_per_epoch
    data.number = 6 * per_step + 1
    assert not attempt().run()
    assert data.finished
    again = attempt()
    assert again.resume().step == 7
    assert again.run()
    mixed = weights(directory, 10)
    directory.path.rename(tmp_path / "first")
    directory.create(0o750)
    assert attempt().run()
    assert all(torch.equal(value, mixed[name]) for name, value in weights(directory, 10).items())


@pytest.mark.parametrize("draws", [False, True])
def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(attempt, tmp_path, directory, draws):
    """Held-out samples that are made at random shift no numbers of the training either."""
    words = [f"+task.draws={draws}"]
    assert not attempt(*words, "+task.signal_in=loss", "+task.signal_at=13").run()
    again = attempt(*words)
    assert again.resume().step == 7
    assert again.run()
    mixed = weights(directory, 10)
    directory.path.rename(tmp_path / "first")
    directory.create(0o750)
    assert attempt(*words).run()
    for name, value in weights(directory, 10).items():
        assert torch.equal(value, mixed[name]), name


def test_the_progress_changes_with_steps_and_with_evaluated_batches(attempt):
    trainer, before = attempt(), []
    trainer.run(lambda running: before.append(running.progress))
    step, batches = trainer.running.progress
    assert before == [(0, 0)]
    # two before the first step
    assert (step, batches) == (10, 8)


def test_the_best_cannot_be_kept_without_an_evaluation(attempt):
    with pytest.raises(ConfigError, match="keep_best=1: nothing is evaluated"):
        attempt("+task.eval_samples=0", "checkpoint.keep_best=1").run()


def test_callbacks_that_need_an_evaluation_are_refused_or_warned_of_without_one(attempt, caplog):
    with pytest.raises(ConfigError, match=r"^callbacks\.early_stopping\._target_=.*: nothing is evaluated: .*leave"):
        attempt("+task.eval_samples=0", "callbacks=[early_stopping]").run()
    attempt("+task.eval_samples=0", "callbacks=[log_images,log_weights]").resume()
    (said,) = [message for message in caplog.messages if "callbacks" in message]
    assert said.startswith("callbacks.log_images: its after_evaluation is never called: nothing is evaluated: ")


def test_an_attempt_that_was_superseded_meanwhile_writes_nothing(attempt, directory):
    with pytest.raises(SupersededError):
        attempt().run(lambda _: Ledger(directory).claim())
    assert not RunDirectory.at(directory.path).metrics.exists()


def test_the_samples_of_every_step_are_written_down_if_configured(attempt, directory):
    attempt("logger.samples=true").run()
    lines = [json.loads(line) for line in directory.sample_log(0).read_text().splitlines()]
    assert [line["step"] for line in lines][:10] == list(range(1, 11))
    assert sorted(sample for line in lines[:4] for sample in line["samples"]) == list(range(24))


def media(directory):
    return [(record["step"], record["name"]) for record in read_json_lines(directory.media_records)]


@pytest.fixture
def logs(monkeypatch):
    """The task logs a text in each loss and evaluation, and the number of its calls."""
    loss, evaluate = small_task.Small.loss, small_task.Small.evaluate

    def logging_loss(task, model, batch):
        task.log.text("note", f"loss at {task.position.step}")
        task.log.scalar("step", task.position.step + 1)
        return {"loss": loss(task, model, batch), "due": float(task.log.will_record)}

    def logging_evaluate(task, model, batch):
        task.log.text("note", f"evaluation at {task.position.step}")
        task.log.scalar("step", task.position.step)
        return evaluate(task, model, batch)

    monkeypatch.setattr(small_task.Small, "loss", logging_loss)
    monkeypatch.setattr(small_task.Small, "evaluate", logging_evaluate)


def test_what_a_task_logs_has_the_number_of_the_record(attempt, directory, logs):
    assert attempt("logger.csv=true").run()
    assert media(directory) == [
        *((step, "train/note") for step in range(1, 5)),
        (4, "eval/note"),
        *((step, "train/note") for step in range(5, 9)),
        (8, "eval/note"),
        (9, "train/note"),
        (10, "train/note"),
        (10, "eval/note"),
    ]
    assert (directory.media / "train/note_00000004.txt").read_text() == "loss at 3"
    assert (directory.media / "eval/note_00000004.txt").read_text() == "evaluation at 4"
    found = records(directory)
    assert [(one["step"], one["train/step"], one["train/due"]) for one in found if "train/step" in one] == [
        (3, 2.0, 1 / 3),
        (6, 5.0, 1 / 3),
        (9, 8.0, 1 / 3),
        (10, 10.0, 1.0),
    ]
    assert [one["eval/step"] for one in found if "eval/step" in one] == [4.0, 8.0, 10.0]
    head, *rows = directory.metrics_csv.read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == [str(record["step"]) for record in found]
    assert {"eval/step", "train/due"} <= {*head.split(",")}


def test_an_abandoned_evaluation_leaves_no_media_and_the_next_attempt_those_of_a_straight_run(
    attempt, tmp_path, directory, logs
):
    # two calls come before the first step, and two for each step
    assert not attempt("+task.signal_in=evaluate", "+task.signal_at=3").run()
    assert media(directory) == [(step, "train/note") for step in range(1, 5)]
    again = attempt()
    assert again.resume().training.position.step == 4
    assert again.run()
    mixed = media(directory), [one | {"time": 0} for one in records(directory)]
    directory.path.rename(tmp_path / "first")
    directory.create(0o750)
    assert attempt().run()
    straight = media(directory), [one | {"time": 0} for one in records(directory)]
    for run in (mixed, straight):
        for record in run[1]:
            for name in [*record]:
                if name.startswith("throughput/"):
                    del record[name]
    assert mixed == straight


@pytest.mark.parametrize(("name", "kinds"), [("due", "text and as value"), ("note", "histogram and as text")])
def test_a_name_is_that_of_one_kind_of_thing(attempt, logs, monkeypatch, name, kinds):
    loss = small_task.Small.loss

    def both(task, model, batch):
        task.log.text("due", "text")
        if name == "note":
            task.log.histogram("note", batch[0])
        return loss(task, model, batch)

    monkeypatch.setattr(small_task.Small, "loss", both)
    with pytest.raises(TaskError, match=f"^Small logs 'train/{name}' as {kinds}: choose another name for one of them"):
        attempt().run()


def test_a_task_logs_media_where_it_derives_metrics_and_no_scalars(attempt, directory, monkeypatch):
    def derive(task, means):
        task.log.text("means", str(sorted(means)))
        return {}

    monkeypatch.setattr(small_task.Small, "derive", derive, raising=False)
    assert attempt().run()
    assert media(directory) == [(4, "eval/means"), (8, "eval/means"), (10, "eval/means")]
    monkeypatch.setattr(small_task.Small, "derive", lambda task, means: task.log.scalar("a", 1.0), raising=False)
    directory.path.rename(directory.path.with_name("first"))
    directory.create(0o750)
    with pytest.raises(TaskError, match="after the last batch: return 'a' from derive"):
        attempt().run()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_also_in_evaluations_and_while_a_checkpoint_is_read(attempt, monkeypatch):
    monkeypatch.setattr("hpctrain.metrics.progress.SHOWN_AFTER_S", 0)
    monkeypatch.setattr("hpctrain.metrics.progress.REDRAW_S", 0)
    before = list(logging.getLogger("hpctrain").handlers)
    terminal, log = Terminal(), io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    assert not attempt("+task.signal_in=loss", "+task.signal_at=13", log_stream=log).run()
    assert attempt(log_stream=log).run()
    shown = [line.split("\r")[0].rstrip() for line in terminal.getvalue().split("\r\x1b[K")]
    bars = [line for line in shown if "%|" in line]
    assert [line.split("|")[0] for line in bars if line.startswith("step")][:3] == [
        "step 1/10  10%",
        "step 2/10  20%",
        "step 3/10  30%",
    ]
    assert any(line.startswith("evaluation 1/2  50%|#####     |") for line in bars)
    assert any(line.startswith("reading the checkpoint 0.0/0.0 GB 100%") for line in bars)
    assert any(line.startswith("step 8/10  eval/loss") for line in shown)
    assert any(line.startswith("step 10/10 100%") for line in bars)
    assert "\r" not in log.getvalue()
    assert " step 8/10  eval/loss" in log.getvalue()
    assert logging.getLogger("hpctrain").handlers == before


def test_progress_in_lines_needs_no_bar(attempt, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert attempt("trainer.progress=lines", log_stream=io.StringIO()).run()
    assert "\r" not in terminal.getvalue()
    assert "step 10/10  eval/loss" in terminal.getvalue()
