from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from hpctrain.errors import TaskError
from hpctrain.tasks.log import TaskLog
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task
from hpctrain.train.task_log import AttachedLog, attach


class Plain(Task):
    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        self.log.scalar("kl", batch.mean())
        self.log.image("first", batch)
        self.log.text("note", "text")
        self.log.histogram("values", batch)
        self.log.figure("figure", object())
        self.log.audio("sound", batch, sample_rate=8000)
        self.log.table("table", ["a"], [[1]])
        return {"loss": model(batch).mean(), "kl2": 2.0, "step": self.position.step}


def attached(task, step=0):
    position = Position(4, 10)
    position.step = step
    log = AttachedLog("Plain", position, total_steps=10, every_steps=3)
    attach(task, log, position)
    return log


def test_outside_of_a_training_a_task_logs_into_the_void_and_is_at_the_start():
    task = Plain()
    assert task.loss(nn.Identity(), torch.ones(3))["loss"] == 1.0
    assert not task.log.will_record
    assert (task.position.step, task.position.epoch, task.position.progress) == (0, 0, 0.0)


def test_a_name_is_checked_once_per_kind_of_record(monkeypatch):
    checked = []
    monkeypatch.setattr(
        "hpctrain.train.task_log.check_name", lambda where, name, own: checked.append((name, "lr" in own))
    )
    log = attached(Plain())
    with log.training():
        for _ in range(3):
            log.scalar("kl", 1.0)
            with log.in_hooks(computing=True):
                log.scalar("norm", 1.0)
            with log.evaluation_mode():
                log.scalar("kl", 1.0)
    assert checked == [("kl", True), ("norm", True), ("kl", False)]


def test_the_default_evaluation_has_the_values_of_the_mapping():
    sums = Plain().evaluate(nn.Identity(), torch.ones(3))
    assert {name: (float(total), count) for name, (total, count) in sums.items()} == {
        "loss": (3.0, 3),
        "kl2": (6.0, 3),
        "step": (0.0, 3),
    }


def test_step_epoch_and_progress():
    task = Plain()
    attached(task, step=9)
    assert (task.position.step, task.position.epoch, task.position.progress) == (9, 2, 0.9)


def test_a_tasks_own_attributes_stay():
    class Owner(Plain):
        log = "mine"

        @property
        def position(self):
            raise RuntimeError("the task's own")

    class Instance(Plain):
        def __init__(self):
            self.log = print

    task, other = Owner(), Instance()
    attached(task)
    log = attached(other)
    assert task.log == "mine"
    assert other.log is print
    assert other.position is log._position


def test_a_frozen_dataclass_gets_its_log():
    @dataclasses.dataclass(frozen=True)
    class Frozen(Plain):
        size: int = 3

    task = Frozen()
    assert task.log is not attached(task) or task.log.will_record is False
    assert isinstance(task.log, AttachedLog)
    assert task == Frozen()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda task: pickle.loads(pickle.dumps(task))])
def test_a_copy_of_a_task_discards_and_knows_its_position(duplicate):
    task = Plain()
    log = attached(task, step=3)
    with log.training():
        twin = duplicate(task)
        twin.log.scalar("kl", 1.0)
        assert log.scalars == []
    assert type(twin.log) is TaskLog
    assert twin.position.step == 3


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("grad_norm", 1.0, "logs 'grad_norm', which hpctrain itself logs"),
        ("", 1.0, "expected a string of 1 to 200 printable characters"),
        ("a\nb", 1.0, "printable"),
        ("kl", torch.ones(2), r"expected a scalar as 'kl', found a tensor of shape \[2\]"),
        ("kl", None, "found a NoneType"),
    ],
)
def test_a_scalar_that_is_refused_even_where_it_would_be_discarded(name, value, problem):
    task = Plain()
    attached(task)
    with pytest.raises(TaskError, match=rf"Plain\.log\.scalar.*{problem}"):
        task.log.scalar(name, value)


def test_in_a_forked_loading_process_everything_is_discarded(monkeypatch):
    task = Plain()
    log = attached(task)
    with log.training():
        monkeypatch.setattr("hpctrain.train.task_log.os.getpid", lambda: -1)
        task.log.scalar("kl", 1.0)
        task.log.text("note", "text")
        assert (log.scalars, log.media._media) == ([], {})


def test_names_of_turns_are_refused_as_well():
    task = Plain()
    log = attached(task)
    log.reserve(["train/loss/critic", "train/lr/critic"])
    with pytest.raises(TaskError, match="logs 'lr/critic', which hpctrain itself logs"):
        task.log.scalar("lr/critic", 1.0)
    task.log.scalar("loss/kl", 1.0)


def test_in_an_evaluation_names_are_its_own():
    task = Plain()
    log = attached(task)
    with log.training(), log.evaluation_mode():
        task.log.scalar("epoch", 1.0)
        assert log.scalars == [("epoch", 1.0, None)]


def test_a_context_within_another_leaves_what_was_logged_outside_of_it():
    task = Plain()
    log = attached(task)
    with log.training():
        with log.evaluation_mode():
            task.log.scalar("mine", 1.0)
            with log.discarding():
                task.log.scalar("other", 2.0)
            assert log.scalars == [("mine", 1.0, None)]
        assert log.scalars == []
