import pytest
import torch
from torch import nn

from hpctrain.parallel.frozen_parameters import _CopyOnWrite, frozen_parameters_restored


@pytest.fixture
def copied(monkeypatch):
    """The places of the parameters that are copied, in their order."""
    places, copy = [], _CopyOnWrite._copy
    monkeypatch.setattr(_CopyOnWrite, "_copy", lambda mode, place: (places.append(place), copy(mode, place)))
    return places


def frozen(*sizes):
    return nn.ParameterList([nn.Parameter(torch.randn(size), requires_grad=False) for size in sizes])


def test_parameters_that_are_only_read_are_not_copied(copied):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).requires_grad_(False)
    model[2].requires_grad_(True)
    with frozen_parameters_restored(model, compiled=False):
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
    with frozen_parameters_restored(model, compiled=False), torch.no_grad():
        write(model[1])
        assert not torch.equal(model[1], before)
        write(model[1])
    assert torch.equal(model[1], before)
    assert copied == [1]


def test_parameters_in_the_same_memory_are_restored():
    model = frozen(1, 1)
    flat = torch.arange(4.0)
    model[0].data, model[1].data = flat[:2], flat[2:]
    with frozen_parameters_restored(model, compiled=False), torch.no_grad():
        flat.zero_()
    assert flat.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("compiled", [False, True])
def test_replaced_data_are_restored_with_their_shape_and_dtype(compiled):
    model = frozen(3)
    before = model[0].clone()
    memory = model[0].data_ptr()
    with frozen_parameters_restored(model, compiled=compiled), torch.no_grad():
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
        with frozen_parameters_restored(model, compiled=False), torch.no_grad():
            torch.distributed.broadcast(model[0], src=0, group=work)
            torch.distributed.all_gather([model[0].data], torch.full((3,), 7.0))
            assert model[0].tolist() == [7.0] * 3
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(model[0], before)


def test_all_are_copied_where_compiled_code_may_write_to_them(copied):
    with frozen_parameters_restored(frozen(1, 2), compiled=True):
        assert copied == [0, 1]
