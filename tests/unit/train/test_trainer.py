from __future__ import annotations

import json

import pytest
import torch

from hpctrain.checkpoint.read import load
from hpctrain.errors import ConfigError, SupersededError
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger


def records(directory):
    return [json.loads(line) for line in directory.metrics.read_text().splitlines()]


def weights(directory, step):
    return load(directory.checkpoint(step)).model


def test_it_trains_evaluates_and_saves_at_the_configured_steps(attempt, directory):
    trainer = attempt()
    assert (trainer.step, trainer.total_steps) == (0, 10)
    assert trainer.run()
    assert trainer.step == 10
    found = records(directory)
    assert [record["step"] for record in found if "train/loss" in record] == [3, 6, 9, 10]
    assert [record["step"] for record in found if "eval/loss" in record] == [4, 8, 10]
    assert [info.step for info in list_checkpoints(directory)] == [5, 10]


@pytest.mark.parametrize("draws", [False, True])
def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(attempt, tmp_path, directory, draws):
    """Held-out samples that are made at random shift no numbers of the training either."""
    words = [f"+task.draws={draws}"]
    assert not attempt(*words, "+task.signal_in=loss", "+task.signal_at=13").run()
    again = attempt(*words)
    assert again.step == 7
    assert again.run()
    mixed = weights(directory, 10)
    directory.path.rename(tmp_path / "first")
    directory.create(0o750)
    assert attempt(*words).run()
    for name, value in weights(directory, 10).items():
        assert torch.equal(value, mixed[name]), name


def test_the_progress_changes_with_steps_and_with_evaluated_batches(attempt):
    trainer = attempt()
    before = trainer.progress
    trainer.run()
    step, batches = trainer.progress
    assert before == (0, 0)
    # two before the first step
    assert (step, batches) == (10, 8)


def test_the_best_cannot_be_kept_without_an_evaluation(attempt):
    with pytest.raises(ConfigError, match="keep_best=1: nothing is evaluated"):
        attempt("+task.eval_samples=0", "checkpoint.keep_best=1")


def test_an_attempt_that_was_superseded_meanwhile_writes_nothing(attempt, directory):
    trainer = attempt()
    Ledger(directory).claim()
    with pytest.raises(SupersededError):
        trainer.run()
    assert not RunDirectory.at(directory.path).metrics.exists()


def test_the_samples_of_every_step_are_written_down_if_configured(attempt, directory):
    attempt("logger.samples=true").run()
    lines = [json.loads(line) for line in directory.sample_log(0).read_text().splitlines()]
    assert [line["step"] for line in lines][:10] == list(range(1, 11))
    assert sorted(sample for line in lines[:4] for sample in line["samples"]) == list(range(24))
