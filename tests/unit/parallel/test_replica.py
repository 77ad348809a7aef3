import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.config.parallel import Parallel
from hpctrain.errors import ConfigError
from hpctrain.parallel.replica import (
    LossModule,
    buffers_and_rng_restored,
    inner,
    replicate,
    settle_buckets,
    synchronise_batchnorm,
    training_pass_undone,
)
from hpctrain.rank.world import World

ALONE = World(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),))


def test_alone_a_model_is_not_wrapped():
    model = nn.Linear(2, 2)
    assert replicate(model, ALONE, Parallel()) is model
    assert inner(model) is model


def test_alone_there_is_no_throwaway_backward():
    settle_buckets(nn.Linear(2, 2), ALONE, lambda: pytest.fail("a throwaway backward"))


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


def test_data_parallel_warns_that_it_is_slow_and_keeps_the_names_of_the_model(caplog):
    model = nn.Linear(2, 2)
    with caplog.at_level("WARNING", logger="hpctrain.train"):
        replica = replicate(model, ALONE, Parallel(kind="data_parallel"))
    assert isinstance(replica, nn.parallel.DataParallel)
    assert inner(replica) is model
    assert "parallel=ddp keeps a replica per process" in caplog.text


def test_a_replica_for_a_loss_ignores_the_parameters_that_the_model_names():
    model = nn.Linear(1, 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    module = LossModule(model)
    assert module._ddp_params_and_buffers_to_ignore == ["module.bias"]
    assert set(module._ddp_params_and_buffers_to_ignore) < module.state_dict().keys()
    assert LossModule(nn.Linear(1, 1))._ddp_params_and_buffers_to_ignore == []
