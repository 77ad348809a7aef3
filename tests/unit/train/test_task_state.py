from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.errors import TaskError
from hpctrain.tasks.position import Position
from hpctrain.tasks.task import Task
from hpctrain.train.task_log import AttachedLog, attach
from hpctrain.train.task_state import TaskState, device_at, place_of


class Stateless(Task):
    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        raise NotImplementedError


class Counting(Stateless):
    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Saving(Stateless):
    def state_dict(self):
        return {}


class Loading(Stateless):
    def load_state_dict(self, state):
        pass


class Derived(Stateless, nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))


@pytest.fixture(autouse=True)
def warnings_are_caught(caplog):
    caplog.set_level(logging.WARNING, "hpctrain.train")


def test_it_is_saved_as_plain_copies_and_restored(lone_world, caplog):
    task = Counting(total=torch.ones(2, requires_grad=True), best={3: np.float64(0.5)}, names=["a"])
    state = TaskState(task, lone_world)
    (saved,) = state.state()["task"]
    with torch.no_grad():
        task.state["total"].add_(1)
    assert saved["state"]["total"].tolist() == [1, 1]
    assert type(saved["state"]["best"][3]) is float
    state.load_state({"task": [saved]})
    assert task.state["best"] == {3: 0.5}
    assert task.state["total"].tolist() == [1, 1]
    assert task.state["total"].data_ptr() != saved["state"]["total"].data_ptr()
    assert caplog.messages == []


def test_a_task_may_return_its_attributes(lone_world):
    class Whole(Stateless):
        def state_dict(self):
            return vars(self)

        def load_state_dict(self, state):
            vars(self).update(state)

    task = Whole()
    task.seen = 3
    position = Position()
    log = AttachedLog("Whole", position, total_steps=1, every_steps=1)
    attach(task, log, position)
    state = TaskState(task, lone_world)
    saved = state.state()
    assert saved["task"][0]["state"] == {"seen": 3}
    task.seen = 9
    state.load_state(saved)
    assert (task.seen, task.log, task.position) == (3, log, position)


def test_a_task_that_is_a_module_has_its_buffers_saved(lone_world):
    task = Derived()
    state = TaskState(task, lone_world)
    saved = state.state()
    task.total += 1
    state.load_state(saved)
    assert task.total.tolist() == [0, 0]


def test_the_model_that_a_task_holds_as_a_module_is_not_saved_again(lone_world):
    class Holding(Derived):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.critic = nn.Linear(2, 1)

    task = Holding()
    model = nn.Sequential(task.net, nn.Linear(2, 2))
    state = TaskState(task, lone_world)
    state.leave_out(model)
    saved = state.state()
    assert [*saved["task"][0]["state"]] == ["total", "critic.weight", "critic.bias"]
    with torch.no_grad():
        task.critic.weight.add_(1)
        task.net[0].weight.add_(1)
    trained, state_of_model = task.net[0].weight.clone(), state.snapshot()
    state.load_state(saved)
    state.restore_snapshot(state_of_model)
    assert torch.equal(task.net[0].weight, trained)
    del task.total, task.critic
    state.leave_out(model)
    assert state.state()["task"] is None


def test_tensors_arrive_on_the_device_from_which_they_were_saved(lone_world):
    task = Counting()
    # of a rank with another device than the CPU that exists everywhere
    elsewhere = replace(lone_world, devices=(torch.device("meta"),))
    state = {"queue": torch.ones(2), "seen": [torch.ones(1)]}
    TaskState(task, elsewhere).load_state({"task": [{"state": state, "places": [0, None]}]})
    assert (task.state["queue"].device.type, task.state["seen"][0].device.type) == ("meta", "cpu")
    # a run that goes on without GPUs
    TaskState(task, lone_world).load_state({"task": [{"state": state, "places": [0, None]}]})
    assert task.state["queue"].tolist() == [1, 1]
    first, second = torch.device("cuda", 4), torch.device("cuda", 5)
    places = [place_of(device, (first, second)) for device in (torch.device("cpu"), first, second)]
    assert places == [None, 0, 1]
    assert [device_at(place, (first, second)) for place in places] == [torch.device("cpu"), first, second]
    assert device_at(1, (first,)) == first


def test_a_tensor_with_two_names_stays_one(lone_world):
    shared = torch.ones(2)
    task = Counting(queue=shared, same=shared)
    state = TaskState(task, lone_world)
    saved = state.state()
    with state.restored():
        pass
    assert task.state["queue"] is task.state["same"]
    state.load_state(saved)
    assert task.state["queue"] is task.state["same"]


def test_a_task_without_state_saves_none(lone_world, caplog):
    state = TaskState(Stateless(), lone_world)
    state.check()
    assert state.state()["task"] is None
    with state.restored():
        pass
    state.load_state({})
    assert caplog.messages == []
    state.load_state({"task": [{"total": 1}]})
    assert caplog.messages == ["ignoring the task state in the checkpoint: Stateless has no load_state_dict"]


def test_a_checkpoint_of_an_earlier_version_leaves_the_state_as_it_is_built(lone_world, caplog):
    task = Counting(total=0)
    TaskState(task, lone_world).load_state({})
    assert task.state == {"total": 0}
    assert caplog.messages == ["the checkpoint has no task state: Counting starts with a fresh one"]


def test_each_rank_gets_its_own_and_that_of_rank_zero_at_another_world_size(lone_world, caplog):
    task = Counting()
    saved = [{"state": {"total": total}, "places": []} for total in (0, 1)]
    TaskState(task, replace(lone_world, rank=1, size=2)).load_state({"task": saved})
    assert task.state == {"total": 1}
    assert caplog.messages == []
    TaskState(task, lone_world).load_state({"task": saved})
    assert task.state == {"total": 0}
    assert "2 ranks saved a task state, and this attempt has 1: each rank gets rank zero's" in caplog.messages[0]


def test_a_pass_in_its_context_leaves_no_trace(lone_world):
    task = Counting(seen=[1], total=torch.zeros(1))
    with TaskState(task, lone_world).restored():
        task.state["seen"].append(2)
        task.state["total"] += 1
    assert task.state == {"seen": [1], "total": torch.zeros(1)}
    # not on the CPU, where the tensors of a checkpoint are
    elsewhere = Counting(total=torch.zeros(1, device="meta"))
    with TaskState(elsewhere, lone_world).restored():
        pass
    assert elsewhere.state["total"].device.type == "meta"


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Saving, "has state_dict, but no load_state_dict"), (Loading, "has load_state_dict, but no state_dict")],
)
def test_one_method_without_the_other_is_refused(lone_world, kind, message):
    with pytest.raises(TaskError, match=f"{kind.__name__} {message}.*define both"):
        TaskState(kind(), lone_world)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"seen": {"a": {1}}}, r"Counting\.state_dict\(\)\['seen'\]\['a'\] is a builtins\.set; .*convert it"),
        ({"seen": {(1, 2): 3}}, r"Counting\.state_dict\(\)\['seen'\] has the key \(1, 2\)"),
        ([1], r"Counting\.state_dict must return a dict, but it returned a list"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_named(lone_world, state, message):
    task = Counting()
    task.state = state
    with pytest.raises(TaskError, match=message):
        TaskState(task, lone_world).check()
