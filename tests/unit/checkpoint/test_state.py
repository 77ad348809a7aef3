from __future__ import annotations

import hashlib
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpctrain.checkpoint.page_locked import PageLockedMemory
from hpctrain.checkpoint.rng import rng_state
from hpctrain.checkpoint.state import Head, LiveState, PlainNames, names_by_id, parameter_names, weights_digest
from hpctrain.errors import CheckpointError

HEAD = Head(step=3, samples_seen=24, world_size=2, config_digest="c0")


def addresses(tree):
    if isinstance(tree, torch.Tensor):
        return [tree.data_ptr()]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else []
    return [address for item in items for address in addresses(item)]


def test_the_three_parts_hold_what_the_format_documents(trained):
    model, optimizer = trained()
    rng = [rng_state(), rng_state()]
    snapshot = LiveState(model, {"": optimizer}, extra={"best": 0.5}, head=HEAD, rng=rng).capture()
    assert list(snapshot.model) == list(model.state_dict())
    assert snapshot.optimizer["param_groups"] == optimizer.state_dict()["param_groups"]
    assert {name: snapshot.state[name] for name in asdict(HEAD)} == asdict(HEAD)
    assert (snapshot.state["scaler"], snapshot.state["extra"]) == (None, {"best": 0.5})
    assert [state["torch"].equal(rng[0]["torch"]) for state in snapshot.state["rng"]] == [True, True]


def test_the_size_of_a_copy_of_gpu_memory_is_that_of_page_locked_blocks():
    """The meta device stands for a GPU."""
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.empty(500_000, 7, device="meta")))
    model.register_buffer("mean", torch.empty(1024, device="meta"))
    model.register_buffer("on_the_host", torch.empty(3, 3))
    average = {"average": [torch.empty(5, device="meta")]}
    state = LiveState(model, {"": torch.optim.SGD(model.parameters())}, head=HEAD, extra=average)
    assert state.missing_bytes(PageLockedMemory(device_type="meta")) == 2**24 + 36


def test_training_on_changes_nothing_in_a_snapshot(trained):
    model, optimizer = trained()
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    before = [tensor.clone() for tensor in snapshot.model.values()]
    moment = snapshot.optimizer["state"][0]["exp_avg"].clone()
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, before, snapshot.model.values()))
    assert torch.equal(moment, snapshot.optimizer["state"][0]["exp_avg"])


def test_an_earlier_snapshots_buffers_are_used_again(trained):
    model, optimizer = trained()
    first = LiveState(model, {"": optimizer}, head=HEAD, rng=[rng_state()]).capture()
    kept = addresses((first.model, first.optimizer, first.state))
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    second = LiveState(model, {"": optimizer}, head=replace(HEAD, step=4), rng=[rng_state()]).capture(first)
    assert addresses((second.model, second.optimizer, second.state)) == kept
    fresh = LiveState(model, {"": optimizer}, head=replace(HEAD, step=4)).capture()
    assert all(map(torch.equal, second.model.values(), fresh.model.values()))
    assert second.state["step"] == 4


def test_an_earlier_snapshot_without_optimizer_state_is_ignored(trained):
    model, optimizer = trained(steps=0)
    empty = LiveState(model, {"": optimizer}, head=HEAD).capture()
    assert empty.optimizer["state"] == {}
    model, optimizer = trained(steps=1)
    assert len(LiveState(model, {"": optimizer}, head=HEAD).capture(empty).optimizer["state"]) == 6


def test_tied_weights_stay_one():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    snapshot = LiveState(model, {"": torch.optim.SGD(model.parameters())}, head=HEAD).capture()
    assert snapshot.model["0.weight"].data_ptr() == snapshot.model["1.weight"].data_ptr()


def test_extra_state_of_modules_is_saved_as_they_gave_it():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"calls": 7}

    model = Counting(2, 2)
    assert LiveState(model, {"": torch.optim.SGD(model.parameters())}, head=HEAD).capture().model["_extra_state"] == {
        "calls": 7
    }


def test_what_cant_be_saved_is_named_by_its_place(trained):
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"state\['extra'\]\['when'\] is a builtins.object"):
        LiveState(model, {"": optimizer}, extra={"when": object()}, head=HEAD).capture()
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(CheckpointError, match=r"optimizer\['param_groups'\]\[0\]\['hook'\]"):
        LiveState(model, {"": optimizer}, head=HEAD).capture()


def test_a_disabled_scaler_has_no_state(trained):
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert LiveState(model, {"": optimizer}, scalers={"": scaler}, head=HEAD).capture().state["scaler"] is None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert LiveState(model, {"": optimizer}, scalers={"": scaler}, head=HEAD).capture().state["scaler"]["scale"] == 8.0


def compiled(module):
    return torch.compile(module, backend="eager")


class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.inner = inner


def plain_names(model):
    names = PlainNames(model)
    return {names(name) for name in model.state_dict()}


BARE = {"module.weight", "module.bias", "inner.weight", "inner.bias"}


def test_a_plain_model_keeps_its_names_one_called_module_as_well():
    assert plain_names(Net(nn.Linear(2, 2))) == BARE


def test_compiled_modules_lose_their_prefix_wherever_they_are():
    assert plain_names(compiled(Net(compiled(nn.Linear(2, 2))))) == BARE


def test_data_parallel_loses_its_prefix_alone():
    assert plain_names(DataParallel(Net(DataParallel(nn.Linear(2, 2))))) == BARE


@pytest.fixture
def single_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_ddp_over_a_compiled_model_has_plain_names(single_process_group):
    assert plain_names(DistributedDataParallel(compiled(Net(nn.Linear(2, 2))))) == BARE


def test_module_paths_are_made_plain_too():
    names = PlainNames(compiled(Net(nn.Linear(2, 2))))
    assert [names(path) for path in ("", "_orig_mod", "_orig_mod.inner")] == ["", "", "inner"]


def test_what_an_optimizer_trains_is_named_by_group():
    model = compiled(Net(nn.Linear(2, 2)))
    foreign = nn.Parameter(torch.zeros(1))
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    optimizer = torch.optim.SGD([{"params": weights[1:]}, {"params": [foreign, weights[0]]}])
    assert parameter_names(names_by_id(model), optimizer) == [["inner.weight"], ["", "module.weight"]]


def test_the_digest_is_the_documented_one():
    state = {"b": torch.tensor([1.0, -2.0]), "a.bias": torch.tensor(3, dtype=torch.int64)}
    expected = hashlib.sha256(
        b"a.bias\0int64\0\0" + (3).to_bytes(8, "little") + b"b\0float32\x002\0" + bytes.fromhex("0000803f000000c0")
    )
    assert weights_digest(state) == expected.hexdigest()


def test_bfloat16_goes_in_by_its_own_bytes():
    expected = hashlib.sha256(b"w\0bfloat16\x001,2\0" + bytes.fromhex("803f00c0"))
    assert weights_digest({"w": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)}) == expected.hexdigest()


def test_layout_and_order_don_t_count():
    weight = torch.randn(3, 4)
    plain = weights_digest({"x": weight, "y": weight[:, 1]})
    assert weights_digest({"y": weight[:, 1].clone(), "x": weight.t().contiguous().t()}) == plain


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(2, 3)},
        {"w": torch.zeros(3, 2)},
        {"w": torch.zeros(6)},
        {"w": torch.zeros(2, 3, dtype=torch.float64)},
        {"w": torch.zeros(2, 3, dtype=torch.int32)},
        {"w": -torch.zeros(2, 3)},
        {"w": torch.zeros(2, 3), "x": torch.zeros(0)},
        {},
    ],
    ids=["name", "shape", "rank", "size", "kind", "sign bit", "one more", "none"],
)
def test_whatever_differs_shows(other):
    assert weights_digest(other) != weights_digest({"w": torch.zeros(2, 3)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.complex64, torch.uint16, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,)])
def test_every_dense_dtype_and_shape_has_one(dtype, shape):
    assert len(weights_digest({"w": torch.zeros(shape, dtype=dtype)})) == 64


def test_extra_state_is_passed_over():
    assert weights_digest({"w": torch.ones(2), "_extra_state": {"a": 1}}) == weights_digest({"w": torch.ones(2)})
