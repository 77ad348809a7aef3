from __future__ import annotations

import pytest
import torch

from hpctrain.config.compose import Composer
from hpctrain.train.network import build_network
from hpctrain.train.precision import MASTER_TYPES


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize("precision", MASTER_TYPES)
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["trainer.channels_last=true"],
        ["trainer.activation_checkpointing=['features.*']"],
        ["trainer.channels_last=true", "trainer.activation_checkpointing=['features.0']"],
    ],
    ids=" ".join,
)
def test_a_copy_computes_with_what_was_trained_however_it_is_dressed(composer, lone_world, precision, words):
    torch.manual_seed(0)
    config = composer.compose(["model=convnet", "model.width=4", f"precision={precision}", *words])
    network = build_network(config, None, lone_world, None)
    optimizer = torch.optim.SGD(network.module.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in network.module.named_parameters()}
    for _ in range(2):
        network.model(torch.randn(4, 1, 8, 8)).square().mean().backward()
        network.master.collect_gradients()
        optimizer.step()
        with torch.no_grad():
            network.master.publish()
        trained, copied = dict(network.module.named_parameters()), dict(network.model.named_parameters())
        assert trained.keys() == copied.keys()
        for name, value in trained.items():
            assert torch.equal(copied[name], value.to(copied[name].dtype)), name
            assert copied[name].stride() == value.stride(), name
            assert not torch.equal(value, before[name]), name
