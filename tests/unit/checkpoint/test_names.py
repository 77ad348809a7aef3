from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpctrain.checkpoint.names import PlainNames, parameter_names


def compiled(module):
    return torch.compile(module, backend="eager")


class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.inner = inner


def plain(model):
    names = PlainNames(model)
    return {names(name) for name in model.state_dict()}


BARE = {"module.weight", "module.bias", "inner.weight", "inner.bias"}


def test_a_plain_model_keeps_its_names_one_called_module_as_well():
    assert plain(Net(nn.Linear(2, 2))) == BARE


def test_compiled_modules_lose_their_prefix_wherever_they_are():
    assert plain(compiled(Net(compiled(nn.Linear(2, 2))))) == BARE


def test_data_parallel_loses_its_prefix_alone():
    assert plain(DataParallel(Net(DataParallel(nn.Linear(2, 2))))) == BARE


@pytest.fixture
def single_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_over_a_compiled_model_has_plain_names(single_process_group):
    assert plain(DistributedDataParallel(compiled(Net(nn.Linear(2, 2))))) == BARE


def test_module_paths_are_made_plain_too():
    names = PlainNames(compiled(Net(nn.Linear(2, 2))))
    assert [names(path) for path in ("", "_orig_mod", "_orig_mod.inner")] == ["", "", "inner"]


def test_what_an_optimizer_trains_is_named_by_group():
    model = compiled(Net(nn.Linear(2, 2)))
    foreign = nn.Parameter(torch.zeros(1))
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    optimizer = torch.optim.SGD([{"params": weights[1:]}, {"params": [foreign, weights[0]]}])
    assert parameter_names(model, optimizer) == [["inner.weight"], ["", "module.weight"]]
