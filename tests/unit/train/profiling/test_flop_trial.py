from __future__ import annotations

import random

import torch
from torch import nn

from hpctrain.tasks.task import Task
from hpctrain.train.profiling.flop_trial import flops_by_trial, is_compiled
from hpctrain.train.profiling.flops import FlopCount


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10))


def state(model):
    values = [value.flatten().double() for value in model.state_dict().values()]
    return torch.cat([*values, torch.random.get_rng_state().double()]), random.getstate()


def test_it_is_what_a_step_counts_and_leaves_no_trace(step_over, supply, lone_world):
    model = network()
    step = step_over(model)
    before = state(model)
    found = flops_by_trial(step, next(supply()), lone_world)
    after = state(model)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert all(parameter.grad is None for parameter in model.parameters())
    with FlopCount() as count:
        step(0, supply())
    assert found == count.total / 12


def test_a_compiled_model_is_taken_as_it_was(step_over, supply, lone_world):
    plain, compiled = network(), network()
    assert not is_compiled(step_over(plain))
    compiled[0].compile(backend="eager")
    step = step_over(compiled)
    assert is_compiled(step)
    assert is_compiled(step_over(nn.Sequential(torch.compile(network(), backend="eager"))))
    forward_alone = network()
    forward_alone.forward = torch.compile(forward_alone.forward, backend="eager")
    assert is_compiled(step_over(nn.Sequential(forward_alone)))
    step(0, supply())
    micro_batch = next(supply())
    assert flops_by_trial(step, micro_batch, lone_world) == flops_by_trial(step_over(plain), micro_batch, lone_world)


class Whole(Task):
    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return model(batch[0]).reshape(6, 10).mean()


def test_a_task_that_can_not_do_with_less_is_no_reason_to_stop(step_over, supply, lone_world):
    assert flops_by_trial(step_over(network(), Whole()), next(supply()), lone_world) is None
    nothing = next(supply())._replace(num_samples=0)
    assert flops_by_trial(step_over(network()), nothing, lone_world) is None
