from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hpctrain.checkpoint.rng import rng_state
from hpctrain.checkpoint.state import Head, capture, held_bytes
from hpctrain.errors import CheckpointError

HEAD = Head(step=3, samples_seen=24, world_size=2, config_digest="c0")


def addresses(tree):
    if isinstance(tree, torch.Tensor):
        return [tree.data_ptr()]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else []
    return [address for item in items for address in addresses(item)]


def test_the_three_parts_hold_what_the_format_says(trained):
    model, optimizer = trained()
    rng = [rng_state(), rng_state()]
    snapshot = capture(model, optimizer, None, {"best": 0.5}, head=HEAD, rng=rng)
    assert list(snapshot.model) == list(model.state_dict())
    assert snapshot.optimizer["param_groups"] == optimizer.state_dict()["param_groups"]
    assert {name: snapshot.state[name] for name in asdict(HEAD)} == asdict(HEAD)
    assert (snapshot.state["scaler"], snapshot.state["extra"]) == (None, {"best": 0.5})
    assert [state["torch"].equal(rng[0]["torch"]) for state in snapshot.state["rng"]] == [True, True]


def test_what_a_copy_of_a_gpus_memory_takes_is_told_as_it_is_taken():
    """In page-locked memory, each tensor rounded up to a power of two."""
    with FakeTensorMode():
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.empty(5000, 7, device="cuda")))
        model.register_buffer("mean", torch.empty(1024, device="cuda"))
        model.register_buffer("on_the_host", torch.empty(3, 3))
        optimizer = torch.optim.SGD(model.parameters())
        assert held_bytes(model, optimizer, {"average": [torch.empty(5, device="cuda")]}) == 2**18 + 4096 + 36 + 32


def test_training_on_changes_nothing_in_a_snapshot(trained):
    model, optimizer = trained()
    snapshot = capture(model, optimizer, head=HEAD)
    before = [tensor.clone() for tensor in snapshot.model.values()]
    moment = snapshot.optimizer["state"][0]["exp_avg"].clone()
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, snapshot.model.values()))
    assert torch.equal(moment, snapshot.optimizer["state"][0]["exp_avg"])


def test_an_earlier_snapshots_buffers_are_used_again(trained):
    model, optimizer = trained()
    first = capture(model, optimizer, head=HEAD, rng=[rng_state()])
    kept = addresses((first.model, first.optimizer, first.state))
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    second = capture(model, optimizer, head=replace(HEAD, step=4), rng=[rng_state()], into=first)
    assert addresses((second.model, second.optimizer, second.state)) == kept
    fresh = capture(model, optimizer, head=replace(HEAD, step=4))
    assert all(map(torch.equal, second.model.values(), fresh.model.values()))
    assert second.state["step"] == 4


def test_a_first_snapshot_without_optimizer_state_is_no_hindrance(trained):
    model, optimizer = trained(steps=0)
    empty = capture(model, optimizer, head=HEAD)
    assert empty.optimizer["state"] == {}
    model, optimizer = trained(steps=1)
    assert len(capture(model, optimizer, head=HEAD, into=empty).optimizer["state"]) == 6


def test_tied_weights_stay_one():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    snapshot = capture(model, torch.optim.SGD(model.parameters()), head=HEAD)
    assert snapshot.model["0.weight"].data_ptr() == snapshot.model["1.weight"].data_ptr()


def test_extra_state_of_modules_is_saved_as_they_gave_it():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"calls": 7}

    model = Counting(2, 2)
    assert capture(model, torch.optim.SGD(model.parameters()), head=HEAD).model["_extra_state"] == {"calls": 7}


def test_what_cant_be_saved_is_named_by_its_place(trained):
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"state\['extra'\]\['when'\] is a builtins.object"):
        capture(model, optimizer, None, {"when": object()}, head=HEAD)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(CheckpointError, match=r"optimizer\['param_groups'\]\[0\]\['hook'\]"):
        capture(model, optimizer, head=HEAD)


def test_a_disabled_scaler_has_no_state(trained):
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert capture(model, optimizer, scaler, head=HEAD).state["scaler"] is None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert capture(model, optimizer, scaler, head=HEAD).state["scaler"]["scale"] == 8.0
