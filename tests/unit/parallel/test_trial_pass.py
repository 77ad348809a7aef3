import random

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.parallel.trial_pass import (
    FrozenParametersRestored,
    buffers_and_rng_restored,
    training_pass_undone,
)
from hpctrain.rank.world import World

ALONE = World(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),))


@pytest.fixture
def copied(monkeypatch):
    """The places of the parameters that are copied, in their order."""
    places, copy = [], FrozenParametersRestored._copy
    monkeypatch.setattr(
        FrozenParametersRestored, "_copy", lambda mode, place: (places.append(place), copy(mode, place))
    )
    return places


def frozen(*sizes):
    return nn.ParameterList([nn.Parameter(torch.randn(size), requires_grad=False) for size in sizes])


def test_parameters_that_are_only_read_are_not_copied(copied):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).requires_grad_(False)
    model[2].requires_grad_(True)
    with FrozenParametersRestored(model, compiled=False):
        model(torch.randn(4, 2)).sum().backward()
        torch.optim.SGD(model[2].parameters(), lr=0.1).step()
    assert copied == []


def assign(weight):
    weight[0] = 5.0


def write_out(weight):
    torch.add(weight, 1.0, out=weight)


WRITES = {
    "in place": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.mul_(2),
    "view": lambda weight: weight.view(2, 2)[0].zero_(),
    "index": assign,
    "list": lambda weight: torch._foreach_lerp_([weight], [torch.ones(4)], 0.1),
    "out": write_out,
    "init": nn.init.ones_,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_parameter_is_copied_once_before_it_is_written_to(copied, write):
    model = frozen(3, 4)
    before = model[1].clone()
    with FrozenParametersRestored(model, compiled=False), torch.no_grad():
        write(model[1])
        assert not torch.equal(model[1], before)
        write(model[1])
    assert torch.equal(model[1], before)
    assert copied == [1]


def test_parameters_in_the_same_memory_are_restored():
    model = frozen(1, 1)
    flat = torch.arange(4.0)
    model[0].data, model[1].data = flat[:2], flat[2:]
    with FrozenParametersRestored(model, compiled=False), torch.no_grad():
        flat.zero_()
    assert flat.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("compiled", [False, True])
def test_replaced_data_are_restored_with_their_shape_and_dtype(compiled):
    model = frozen(3)
    before = model[0].clone()
    memory = model[0].data_ptr()
    with FrozenParametersRestored(model, compiled=compiled), torch.no_grad():
        model[0].mul_(2)
        model[0].data = torch.ones(5, dtype=torch.float16)
        model[0].add_(1)
    assert torch.equal(model[0], before)
    assert (model[0].data_ptr(), model[0].requires_grad) == (memory, False)


def test_a_parameter_that_a_collective_writes_to_is_restored(tmp_path):
    model = frozen(3)
    before = model[0].clone()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        work = torch.distributed.group.WORLD
        with FrozenParametersRestored(model, compiled=False), torch.no_grad():
            torch.distributed.broadcast(model[0], src=0, group=work)
            torch.distributed.all_gather([model[0].data], torch.full((3,), 7.0))
            assert model[0].tolist() == [7.0] * 3
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(model[0], before)


def test_all_are_copied_where_compiled_code_may_write_to_them(copied):
    with FrozenParametersRestored(frozen(1, 2), compiled=True):
        assert copied == [0, 1]


def test_a_pass_buffers_and_rng_restored_leaves_buffers_and_random_state_as_they_were():
    model, before = nn.BatchNorm1d(3), torch.random.get_rng_state()
    draw = random.Random(7)
    random.seed(7)
    np.random.seed(7)
    drawn = np.random.RandomState(7).random()
    with buffers_and_rng_restored(model, ALONE):
        model(torch.randn(4, 3))
        random.random()
        np.random.random()
    assert np.random.random() == drawn
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random.random() == draw.random()
    assert (model.num_batches_tracked, model.running_mean.tolist()) == (0, [0.0] * 3)


def test_a_buffer_that_the_pass_replaces_is_restored():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("seen", torch.zeros(0))

        def forward(self):
            self.calls = self.calls + 1
            self.seen = torch.cat([self.seen, torch.ones(1)])
            self.register_buffer("cache", torch.ones(2))

    model = Counter()
    with buffers_and_rng_restored(model, ALONE):
        model()
        assert model.calls == 1
    assert (model.calls, model.seen.numel()) == (0, 0)


def test_the_modes_that_a_pass_changes_are_restored():
    model = nn.Sequential(nn.Dropout(), nn.Linear(1, 1))
    model[0].eval()
    with buffers_and_rng_restored(model, ALONE):
        model.train()
        model[1].eval()
    assert [module.training for module in model.modules()] == [True, False, True]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_parameter_that_a_training_pass_changes_is_restored(compiled):
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1))
    teacher = model[2].requires_grad_(False)
    before = [parameter.clone() for parameter in teacher.parameters()]
    with training_pass_undone(model, ALONE, compiled=compiled):
        model(torch.randn(4, 1))
        with torch.no_grad():
            teacher.weight.mul_(2)
        teacher.bias.data = torch.ones(1)
    assert all(map(torch.equal, before, teacher.parameters()))
    assert model[1].num_batches_tracked == 0
