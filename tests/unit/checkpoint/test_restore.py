from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.restore import restore_model
from hpctrain.checkpoint.restore import restore_optimizer as restore_named
from hpctrain.checkpoint.state import Head, LiveState, buffer_kinds, changed_buffers, names_by_id, parameter_names
from hpctrain.errors import CheckpointError

HEAD = Head(step=3, samples_seen=24, world_size=1, config_digest="c0")


def restore_optimizer(optimizer, snapshot, model, changed=()):
    restore_named(
        optimizer,
        snapshot.optimizer,
        names=parameter_names(names_by_id(model), optimizer),
        saved_names=snapshot.state["parameters"],
        changed_options=changed,
    )


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def train(model, optimizer, steps=2):
    torch.manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, dtype=next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
    return model.state_dict()


OPTIMIZERS = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "fused": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
]


@pytest.mark.parametrize(
    ("kind", "options"), OPTIMIZERS, ids=["AdamW", "fused AdamW amsgrad", "SGD momentum", "RMSprop"]
)
def test_training_after_a_restore_is_the_same_bit_for_bit(trained, kind, options):
    model, optimizer = trained(kind=kind, steps=3, **options)
    optimizer.param_groups[0]["lr"] = 0.005
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    straight = train(model, optimizer)
    other, fresh = trained(seed=1, kind=kind, steps=0, **options)
    restore_model(other, snapshot.model)
    restore_optimizer(fresh, snapshot, other)
    assert fresh.param_groups[0]["lr"] == 0.005
    assert equal(LiveState(other, {"": fresh}, head=HEAD).capture().optimizer, snapshot.optimizer)
    assert equal(train(other, fresh), straight)


def test_nested_optimizer_state_is_restored_into_memory_of_its_own():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=4)
    data = torch.randn(9, 3)

    def closure():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    fresh = torch.optim.LBFGS(model.parameters(), history_size=4)
    restore_optimizer(fresh, snapshot, model)
    assert equal(LiveState(model, {"": fresh}, head=HEAD).capture().optimizer, snapshot.optimizer)
    mine, saved = fresh.state_dict()["state"][0]["old_dirs"][0], snapshot.optimizer["state"][0]["old_dirs"][0]
    assert mine.data_ptr() != saved.data_ptr()


def test_state_in_a_wider_dtype_than_its_parameter_keeps_it(trained):
    model, optimizer = trained()
    model.bfloat16()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    fresh = torch.optim.AdamW(model.parameters())
    restore_optimizer(fresh, snapshot, model)
    assert equal(LiveState(model, {"": fresh}, head=HEAD).capture().optimizer, snapshot.optimizer)


def test_bfloat16_and_channels_last_come_back_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(torch.bfloat16, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    assert snapshot.optimizer["state"][0]["momentum_buffer"].is_contiguous(memory_format=torch.channels_last)
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(torch.bfloat16, memory_format=torch.channels_last)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    restore_model(other, snapshot.model)
    restore_optimizer(fresh, snapshot, other)
    assert equal(LiveState(other, {"": fresh}, head=HEAD).capture().model, snapshot.model)
    assert equal(LiveState(other, {"": fresh}, head=HEAD).capture().optimizer, snapshot.optimizer)


def test_training_on_doesn_t_write_into_what_was_restored_from(trained):
    model, optimizer = trained()
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    before = snapshot.optimizer["state"][0]["exp_avg"].clone()
    restore_model(model, snapshot.model)
    restore_optimizer(optimizer, snapshot, model)
    train(model, optimizer)
    assert torch.equal(snapshot.optimizer["state"][0]["exp_avg"], before)


def test_a_compiled_model_takes_plain_names_and_versions(trained):
    model, optimizer = trained()
    saved = LiveState(model, {"": optimizer}, head=HEAD).capture().model
    other, _ = trained(seed=1)
    restore_model(torch.compile(other, backend="eager"), saved)
    assert equal(dict(other.state_dict()), dict(model.state_dict()))


def test_a_layers_version_reaches_the_layer_under_its_plain_path():
    seen = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    model = torch.compile(nn.Sequential(Versioned(2, 2)), backend="eager")
    saved = LiveState(model, {"": torch.optim.SGD(model.parameters())}, head=HEAD).capture().model
    restore_model(model, saved)
    assert seen == [3]


def model_of(*sizes, dtype=torch.float32):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).to(dtype)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (model_of(4, 4), "only in the checkpoint: 1.bias, 1.weight"),
        (model_of(4, 4, 2, 2), "only in the model: 2.bias, 2.weight"),
        (model_of(4, 4, 3), r"not alike: 1.bias \(float32\[2\] saved, float32\[3\] here\), 1.weight \(float32\[2, 4\]"),
        (model_of(4, 4, 2, dtype=torch.bfloat16), r"0.bias \(float32\[4\] saved, bfloat16\[4\] here\)"),
    ],
    ids=["fewer layers", "more layers", "other shape", "other dtype"],
)
def test_another_model_is_refused_with_the_difference_and_left_alone(other, message):
    model = model_of(4, 4, 2)
    saved = LiveState(model, {"": torch.optim.SGD(model.parameters())}, head=HEAD).capture().model
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        restore_model(other, saved)
    assert equal(dict(other.state_dict()), before)


def test_long_lists_of_differences_are_cut():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    saved = LiveState(model, {"": torch.optim.SGD(model.parameters())}, head=HEAD).capture().model
    with pytest.raises(CheckpointError, match="and 32 more"):
        restore_model(nn.Sequential(), saved)


def test_another_optimizer_is_refused_with_the_difference(trained):
    model, optimizer = trained(kind=torch.optim.SGD, momentum=0.9, lr=0.1)
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    with pytest.raises(
        CheckpointError, match=r"fit the optimizer \(AdamW\): options .*: dampening, momentum, nesterov"
    ):
        restore_optimizer(torch.optim.AdamW(model.parameters()), snapshot, model, changed={"_target_"})
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match=r"parameters per group: \[6\] saved, \[1, 1, 1, 1, 1, 1\] here"):
        restore_optimizer(torch.optim.SGD(groups), snapshot, model)
    first, second, *rest = model.parameters()
    with pytest.raises(CheckpointError, match=r"0\.bias saved where 0\.weight is here, 0\.weight saved where 0\.bias"):
        restore_optimizer(torch.optim.SGD([second, first, *rest]), snapshot, model)


def test_a_schedulers_mark_in_the_groups_is_ignored(trained):
    model, optimizer = trained(kind=torch.optim.SGD, lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    assert "initial_lr" in snapshot.optimizer["param_groups"][0]
    restore_optimizer(torch.optim.SGD(model.parameters()), snapshot, model)


def test_an_option_that_was_changed_is_the_new_one_and_all_others_are_those_that_were_saved(trained):
    model, optimizer = trained(kind=torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.5)
    optimizer.param_groups[0] |= {"initial_lr": 0.1, "seen": 2}
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    fresh = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8, weight_decay=0.1)
    fresh.param_groups[0] |= {"initial_lr": 0.3, "of_a_later_version": True}
    restore_optimizer(fresh, snapshot, model, changed={"weight_decay", "lr_scaling"})
    expected = {"lr": 0.1, "initial_lr": 0.3, "momentum": 0.9, "weight_decay": 0.1, "seen": 2}
    (found,) = fresh.param_groups
    assert found.items() >= (expected | {"of_a_later_version": True}).items()
    assert [*map(id, found["params"])] == [*map(id, model.parameters())]


@pytest.mark.parametrize("changed", [{"fused"}, set()])
def test_a_count_lies_where_the_option_that_was_changed_wants_it(changed):
    """Fused kernels read it on the parameter's device; torch's others keep it in host memory."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    snapshot = LiveState(model, {"": optimizer}, head=HEAD).capture()
    elsewhere = nn.Linear(3, 2, device="meta")
    fresh = torch.optim.AdamW(elsewhere.parameters(), fused=True)
    restore_optimizer(fresh, snapshot, elsewhere, changed)
    assert fresh.param_groups[0]["fused"] is (True if changed else None)
    assert fresh.state[elsewhere.weight]["step"].device.type == ("meta" if changed else "cpu")


class Memory(nn.Module):
    """Has a buffer of each kind of change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("grown", torch.zeros(0, 2))
        self.register_buffer("absent", None)
        self.register_buffer("gone", torch.zeros(1))
        self.register_buffer("number", torch.zeros((), dtype=torch.int64))

    def change(self):
        self.grown = torch.ones(3, 2)
        self.absent = torch.ones(2)
        self.gone = None
        self.number = self.number + 0.5
        self.register_buffer("later", torch.full((4,), 2.0))


def test_buffers_that_training_changed_are_restored_as_they_are_and_others_must_fit():
    trained, model = nn.Sequential(nn.Linear(2, 2), Memory()), nn.Sequential(nn.Linear(2, 2), Memory())
    built = buffer_kinds(trained)
    assert changed_buffers(built, buffer_kinds(trained)) == []
    trained[1].change()
    changed = changed_buffers(built, buffer_kinds(trained))
    assert changed == ["1.absent", "1.gone", "1.grown", "1.later", "1.number"]
    saved = {name: value.clone() for name, value in trained.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"only in the model: 1\.gone; not alike: 1\.number"):
        restore_model(model, saved, [name for name in changed if name not in ("1.gone", "1.number")])
    assert model[1].grown.shape == (0, 2)
    restore_model(model, saved, changed)
    restored = model.state_dict()
    assert restored.keys() == saved.keys()
    assert all(torch.equal(restored[name], value) for name, value in saved.items())
    assert {name: value.dtype for name, value in restored.items()} == {
        name: value.dtype for name, value in saved.items()
    }
    assert model[1].gone is None
