import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.parallel import Parallel
from hpctrain.errors import ConfigError
from hpctrain.parallel.ddp import build_whole_replica, synchronise_batchnorm
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.parallel.replica import LossModule, Replica, inner

ALONE = TrainingWorld(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),))


def test_alone_a_model_is_not_wrapped():
    model = nn.Linear(2, 2)
    replica = build_whole_replica(model, ALONE, Parallel())
    assert type(replica) is Replica
    assert replica.build_loss_module(model).module is model
    assert replica.model is model


def test_alone_there_is_no_throwaway_backward():
    replica = Replica(nn.Linear(2, 2))
    replica.fix_layout(replica.build_loss_module(replica.model), lambda: pytest.fail("a throwaway backward"))


def test_batch_norms_are_replaced_wherever_they_are():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2)), nn.BatchNorm1d(3))
    model[2].eval()
    converted = synchronise_batchnorm(model)
    assert [module.training for module in converted] == [True, True, False]
    assert [type(module).__name__ for module in converted.modules() if "BatchNorm" in type(module).__name__] == [
        "SyncBatchNorm",
        "SyncBatchNorm",
    ]


def test_a_model_without_batch_norm_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"trainer\.sync_batchnorm=True: Linear has no batch norm of torch\.nn"):
        synchronise_batchnorm(nn.Linear(1, 1))


def test_the_model_inside_a_compiled_one():
    model = nn.Linear(2, 2)

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self._orig_mod = model

    assert inner(Compiled()) is model


def test_data_parallel_keeps_the_names_of_the_model():
    model = nn.Linear(2, 2)
    loss_module = build_whole_replica(model, ALONE, Parallel(kind="data_parallel")).build_loss_module(model)
    assert isinstance(loss_module.module, nn.parallel.DataParallel)
    assert inner(loss_module) is model


def test_a_replica_for_a_loss_ignores_the_parameters_that_the_model_names():
    model = nn.Linear(1, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    module = LossModule(model)
    assert module._ddp_params_and_buffers_to_ignore == ["module.bias"]
    assert set(module._ddp_params_and_buffers_to_ignore) < module.state_dict().keys()
    assert LossModule(nn.Linear(1, 1))._ddp_params_and_buffers_to_ignore == []
