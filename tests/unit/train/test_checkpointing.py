from __future__ import annotations

import logging
import os
import signal
import threading

import pytest
import torch

from hpctrain.checkpoint.page_locked import PageLockedMemory
from hpctrain.checkpoint.read import load
from hpctrain.checkpoint.saver import CheckpointSaver
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.rank.agreement import Agreement
from hpctrain.rank.stop_request import Stop, StopKind, StopRequest
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.evaluation import Score
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.train.checkpointing import FIRST_AUTO_SAVE_S, Checkpointing, StartPoint
from hpctrain.train.training import build
from tests.unit.train.small_task import Small


@pytest.fixture
def locking(compose_small, directory, lone_world):
    """The checkpointing of an attempt that saves in the background, its training, and what its saver has locked."""

    def make(*words):
        sizes = []

        def lock(count):
            sizes.append(count)
            return torch.empty(count, dtype=torch.uint8)

        memory = PageLockedMemory(lock, device_type="cpu")
        training = build(compose_small(*words), lone_world)
        claim = Claim(Ledger(directory), Ledger(directory).claim())
        saver = CheckpointSaver(directory, claim, training.config.checkpoint, StopRequest(), page_locked=memory)
        agreement = Agreement(lone_world, StopRequest())
        checkpointing = Checkpointing(training, directory, saver, agreement=agreement, claim=claim)
        return checkpointing, training, memory, sizes

    return make


def saved(directory):
    return [info.step for info in list_checkpoints(directory)]


def test_a_new_run_starts_at_step_zero(checkpointing_of):
    checkpointing, _ = checkpointing_of()
    assert checkpointing.resume() == StartPoint(0, evaluation_due=False)


def test_checkpoints_that_vanish_while_the_attempt_starts_are_an_error(checkpointing_of):
    """A training that was built for a resume may lack initial values."""
    checkpointing, _ = checkpointing_of(resumes=True)
    with pytest.raises(CheckpointError, match="had checkpoints when this attempt started, and has none any more"):
        checkpointing.resume()


def test_a_resume_restores_weights_counters_and_the_random_state(checkpointing_of):
    checkpointing, training = checkpointing_of("trainer.ema_decay=0.5")
    checkpointing.resume()
    training.step.updates[0].num_skipped = 3
    weights = {name: value.clone() for name, value in training.module.state_dict().items()}
    checkpointing.save(6, evaluation_due=True, wait=True)
    expected = torch.rand(3)
    again, others = checkpointing_of("trainer.ema_decay=0.5", "seed=9")
    assert again.resume() == StartPoint(6, evaluation_due=True, resumed_world_size=1)
    assert torch.equal(torch.rand(3), expected)
    assert others.step.updates[0].num_skipped == 3
    assert all(torch.equal(value, weights[name]) for name, value in others.module.state_dict().items())


def test_a_step_that_is_saved_again_without_an_evaluation_keeps_its_score(checkpointing_of, directory):
    checkpointing, _ = checkpointing_of()
    checkpointing.record_evaluation(6, {"eval/loss": 1.0})
    checkpointing.save(6, evaluation_due=False, wait=True)
    for words, expected in (([], Score("loss", "min", 1.0)), (["checkpoint.metric=accuracy"], None)):
        again, _ = checkpointing_of(*words, "checkpoint.metric_mode=min")
        again.resume()
        again.save(6, evaluation_due=False, wait=True)
        assert list_checkpoints(directory)[0].score == expected


def test_a_resume_restores_the_modes_of_the_modules_and_a_checkpoint_without_them_leaves_them_alone(
    checkpointing_of, directory
):
    checkpointing, training = checkpointing_of("+task.frozen=true")
    training.module[1].train()
    training.module[2].eval()
    checkpointing.save(6, evaluation_due=False, wait=True)
    again, others = checkpointing_of("+task.frozen=true")
    again.resume()
    assert [module.training for module in others.module] == [True, True, False]
    older, others = checkpointing_of("+task.frozen=true")
    found = load(directory.checkpoint(6))
    del found.state["extra"]["evaluation_mode"]
    older._restore(found)
    assert [module.training for module in others.module] == [True, False, True]


def test_training_data_of_another_length_are_said(checkpointing_of, directory, monkeypatch, caplog):
    checkpointing, _ = checkpointing_of()
    checkpointing.save(6, evaluation_due=False, wait=True)
    with caplog.at_level(logging.WARNING, "hpctrain.train"):
        checkpointing_of()[0].resume()
        assert caplog.messages == []
        monkeypatch.setattr(Small, "train_dataset", lambda self: self._samples(20, 1))
        shrunk, _ = checkpointing_of()
        shrunk.resume()
    (message,) = caplog.messages
    assert message.startswith("the training data had 24 samples at step 6, and have 20 now: ")
    assert "the run is not exact" in message
    older, _ = checkpointing_of()
    found = load(directory.checkpoint(6))
    del found.state["extra"]["num_samples"]
    older._restore(found)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_memory_for_weights_average_and_optimizer_is_locked_after_the_first_step(locking, resumed):
    words = ["trainer.ema_decay=0.5", "optimizer=adamw"]
    if resumed:
        earlier, *_ = locking(*words)
        earlier.resume()
        earlier.save(6, evaluation_due=False, wait=True)
    checkpointing, training, memory, sizes = locking(*words)
    checkpointing.resume()
    assert sizes == []
    (update,) = training.step.updates
    for parameter in training.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    update.optimizer.step()
    memory.wait_until_locked()
    copies = [parameter.nbytes for parameter in training.module.parameters() for _ in range(4)]
    (memory_of_all,) = sizes
    assert memory.missing_bytes(copies) == 0
    checkpointing.save(7, evaluation_due=False, wait=False)
    checkpointing.save(8, evaluation_due=False, wait=True)
    assert sizes.count(memory_of_all) == 1, "the rest are states of generators, which are on the host in a real run"
    assert memory.missing_bytes(copies) >= sum(copies), "all of it is taken"


@pytest.mark.parametrize(
    ("words", "due_after_s"),
    [
        (["checkpoint.every_min=2"], 120.0),
        (["checkpoint.every_min=null"], None),
        (["checkpoint.auto=true"], FIRST_AUTO_SAVE_S),
    ],
)
def test_a_save_is_due_by_the_clock(checkpointing_of, clock, words, due_after_s):
    checkpointing, _ = checkpointing_of(*words)
    checkpointing.resume()
    clock.advance(1e6 if due_after_s is None else due_after_s - 1)
    assert clock() < checkpointing.due_at_s
    clock.advance(1)
    assert (clock() >= checkpointing.due_at_s) is (due_after_s is not None)
    checkpointing.save(1, evaluation_due=False, wait=True)
    assert clock() < checkpointing.due_at_s


def test_a_save_is_left_out_while_another_is_written_unless_it_is_one_of_the_best(
    compose_small, directory, lone_world, monkeypatch, caplog
):
    """Then it waits for the other one, until a stop is requested."""
    request, disk, fsync = StopRequest(), threading.Event(), os.fsync
    training = build(compose_small("checkpoint.keep_best=1", "checkpoint.keep=9"), lone_world)
    claim = Claim(Ledger(directory), Ledger(directory).claim())
    saver = CheckpointSaver(directory, claim, training.config.checkpoint, request)
    agreement = Agreement(lone_world, request)
    checkpointing = Checkpointing(training, directory, saver, agreement=agreement, claim=claim)

    def save(step, *, frees_disk=False):
        if frees_disk:
            threading.Timer(0.3, disk.set).start()
        return checkpointing.save(step, evaluation_due=False, wait=False)

    checkpointing.resume()
    monkeypatch.setattr(os, "fsync", lambda descriptor: disk.wait(20) and fsync(descriptor))
    with caplog.at_level(logging.INFO, "hpctrain.train"):
        assert save(2) is save(3) is None
        disk.set()
        saver.finish()
        disk.clear()
        save(4)
        monkeypatch.setattr(checkpointing, "best_step", 5)
        assert save(5, frees_disk=True) is None
        saver.finish()
        # one that is due isn't left out for the extra one
        disk.clear()
        save(5)
        assert save(6, frees_disk=True) is None
        saver.finish()
        disk.clear()
        save(7)
        monkeypatch.setattr(checkpointing, "best_step", 8)
        threading.Timer(0.3, request.ask, [signal.SIGTERM]).start()
        assert save(8) == Stop(StopKind.SIGNAL, signal.SIGTERM)
        disk.set()
        saver.finish()
    assert saved(directory) == [2, 4, 5, 6, 7]
    assert "no checkpoint of step 3: the one before is still being written" in caplog.messages
    assert "the checkpoint of step 6 waits for the one before: the one before is one of the best" in caplog.messages


def test_only_evaluations_among_the_best_are_saved_for_their_sake(checkpointing_of):
    checkpointing, _ = checkpointing_of("checkpoint.keep_best=1")
    checkpointing.record_evaluation(4, {"eval/loss": 1.0})
    checkpointing.record_evaluation(8, {"eval/loss": 2.0})
    assert checkpointing.best_step == 4
    with pytest.raises(ConfigError, match="the evaluation returns f1"):
        checkpointing.record_evaluation(10, {"eval/f1": 2.0})


def test_a_file_system_that_refuses_ends_the_run_or_is_tolerated_but_at_the_end(checkpointing_of, directory, caplog):
    directory.checkpoints.rmdir()
    directory.checkpoints.write_text("in the way")
    failing, _ = checkpointing_of()
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 can't be written"):
        failing.save(2, evaluation_due=False, wait=True)
    warning, _ = checkpointing_of("checkpoint.on_error=warn")
    with caplog.at_level(logging.WARNING, "hpctrain.train"):
        warning.save(2, evaluation_due=False, wait=True)
    assert "the run continues without a checkpoint of step 2" in caplog.text
    assert warning.copied_step is None
    with pytest.raises(CheckpointError):
        warning.save(10, evaluation_due=False, wait=True)
