from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.checkpoint.read import choose_newest, load, load_newest, prepare_resume
from hpctrain.checkpoint.restore import restore_weights
from hpctrain.checkpoint.retention import move_replaced
from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.checkpoint.state import Head, LiveState, weights_digest
from hpctrain.checkpoint.warm_start import read_weights
from hpctrain.checkpoint.write import CheckpointWriter
from hpctrain.errors import CheckpointDamagedError, CheckpointError, CheckpointUnlikeError
from hpctrain.rank.world import World
from hpctrain.run.checkpoint_manifest import MANIFEST, read_manifest
from hpctrain.run.checkpoints import find_damage
from hpctrain.run.gone_checkpoints import allow_start_over

HEAD = Head(step=1, samples_seen=1, world_size=1, config_digest="c0")
FORMAT_1 = Path(__file__).parent / "format_1/step_00000003"
"""Written by hpctrain 0.1.0, when it had a writer of safetensors of its own: `trained`'s model, and AdamW, 3 steps."""


def flip(file, where):
    data = bytearray(file.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x04
    file.write_bytes(data)


def damage_cut(path, name):
    (path / name).write_bytes((path / name).read_bytes()[:-1])


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "state.pt", MANIFEST])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path, name: flip(path / name, 0),
        lambda path, name: flip(path / name, 0.5),
        lambda path, name: flip(path / name, 1),
        damage_cut,
        lambda path, name: (path / name).write_bytes(b""),
        lambda path, name: (path / name).unlink(),
        lambda path, name: [file.unlink() for file in path.iterdir()],
    ],
    ids=["header", "middle", "tail", "cut", "emptied", "missing", "all missing"],
)
def test_any_damage_falls_back_to_the_newest_intact_and_is_named(directory, writer, snapshot, caplog, name, damage):
    for step in (1, 2, 3):
        writer.write(snapshot(step))
    damage(directory.checkpoint(3), name)
    chosen, passed_over = choose_newest(directory)
    assert (chosen, [(info.step, info.damaged) for info in passed_over]) == (directory.checkpoint(2), [(3, True)])
    (warning,) = [record for record in caplog.records if record.name == "hpctrain.checkpoint"]
    assert f"taking {directory.checkpoint(2)}" in warning.getMessage()
    assert f"{directory.checkpoint(3)} (" in warning.getMessage()
    assert name in warning.getMessage() or MANIFEST in warning.getMessage()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "optimizer.pt", "state.pt", MANIFEST])
def test_a_flipped_bit_is_found_wherever_it_is(directory, claim, snapshot, name):
    """In a header, in a tensor, in padding, in the zip directory, in the record of the sums themselves."""
    path = CheckpointWriter(directory, claim, safetensors=True).write(snapshot(1))
    data = (path / name).read_bytes()
    positions = sorted({*range(0, len(data), 61), *range(min(64, len(data))), *range(len(data) - 64, len(data))})
    for number, position in enumerate(positions):
        flipped = bytearray(data)
        flipped[position] ^= 1 << number % 8
        (path / name).write_bytes(flipped)
        assert find_damage(path), position
    (path / name).write_bytes(data)
    assert not find_damage(path)


def test_with_none_intact_the_error_names_all_and_what_to_do(directory, writer, snapshot):
    for step in (1, 2):
        flip(writer.write(snapshot(step)) / "model.pt", 0.5)
    with pytest.raises(CheckpointDamagedError) as caught:
        choose_newest(directory)
    text = str(caught.value)
    assert str(directory.checkpoint(1)) in text
    assert str(directory.checkpoint(2)) in text
    assert f"`python -m hpctrain resume {directory.as_typed} resume.from_scratch=true`" in text


def test_a_run_without_checkpoints_starts_from_nothing(directory):
    assert choose_newest(directory) == (None, ())


@pytest.mark.parametrize("from_scratch", [False, True])
def test_one_that_made_way_for_a_new_one_that_was_never_published_is_resumed_from(
    directory, claim, writer, snapshot, from_scratch
):
    move_replaced(writer.write(snapshot(1)))
    if from_scratch:
        allow_start_over(directory, claim.attempt)
    assert prepare_resume(directory, claim, ALONE)
    assert choose_newest(directory) == (directory.checkpoint(1), ())


def test_damage_is_found_before_anything_is_loaded(writer, snapshot):
    path = writer.write(snapshot(1))
    flip(path / "state.pt", 0.5)
    with pytest.raises(CheckpointDamagedError, match=r"state.pt doesn't match its checksum"):
        load(path)


def test_what_torch_cant_read_is_an_error_of_ours(writer, snapshot):
    path = writer.write(snapshot(1))
    (path / "model.pt").write_bytes(b"PK\3\4 but no zip")
    with pytest.raises(CheckpointError, match=r"model.pt can't be loaded"):
        load(path, verified=True)


def test_everything_comes_back_and_the_future_is_the_same(writer, trained):
    def future(model, optimizer, scaler):
        drawn = []
        for _ in range(3):
            noise = torch.randn(8, 6) * random.random() + float(np.random.rand())
            optimizer.zero_grad()
            scaler.scale(model(noise).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            drawn.append(noise)
        return [*model.state_dict().values(), *drawn, torch.tensor(scaler.get_scale())]

    model, optimizer = trained(lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    future(model, optimizer, scaler)
    optimizer.param_groups[0]["lr"] = 0.02
    snapshot = LiveState(
        model,
        {"": optimizer},
        scalers={"": scaler},
        extra={"best": float("inf")},
        head=Head(step=3, samples_seen=24, world_size=1, config_digest="c0"),
        rng=[rng_state()],
    ).capture()
    path = writer.write(snapshot)
    straight = future(model, optimizer, scaler)

    model, optimizer = trained(seed=5, steps=0)
    scaler = torch.amp.GradScaler("cpu")
    found = load(path)
    restore_weights(found.states, model, {"": optimizer}, {"": scaler})
    restore_rng(found.state["rng"][0])
    assert (found.step, found.world_size, found.state["config_digest"]) == (3, 1, "c0")
    assert found.extra == {"best": float("inf")}
    assert all(map(torch.equal, straight, future(model, optimizer, scaler)))


def mapped_files():
    return Path("/proc/self/maps").read_text()


def large_model(seed, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1024, 1200), nn.Linear(1200, 1024))
    return model, torch.optim.AdamW(model.parameters(), **options)


def train(model, optimizer, steps=2):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 1024, generator=generator)).square().mean().backward()
        optimizer.step()
    return [*model.state_dict().values(), *(value for state in optimizer.state.values() for value in state.values())]


@pytest.mark.parametrize("verified", [False, True])
def test_the_restored_optimizer_owns_its_memory(writer, verified):
    model, optimizer = large_model(0, lr=0.01)
    train(model, optimizer)
    path = writer.write(LiveState(model, {"": optimizer}, head=HEAD).capture())
    straight = train(model, optimizer)
    model, optimizer = large_model(5)
    found = load(path, verified=verified)
    assert all(f"{path}/{name}.pt" in mapped_files() for name in ("model", "optimizer"))
    restore_weights(found.states, model, {"": optimizer})
    del found
    assert str(path) not in mapped_files()
    assert all(map(torch.equal, straight, train(model, optimizer)))


def test_state_in_a_wider_dtype_than_its_parameter_is_restored_as_it_was(writer):
    torch.manual_seed(0)
    model = nn.Linear(1200, 2048, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1200)).sum().backward()
    optimizer.step()
    model.bfloat16()
    path = writer.write(LiveState(model, {"": optimizer}, head=HEAD).capture())
    fresh = torch.optim.AdamW(model.parameters())
    restore_weights(load(path).states, model, {"": fresh})
    (kept,), (before,) = fresh.state.values(), optimizer.state.values()
    for name in ("exp_avg", "exp_avg_sq"):
        assert kept[name].dtype == torch.float32
        assert torch.equal(kept[name], before[name])


def test_what_an_optimizer_keeps_for_all_its_parameters_is_its_own_too(writer):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state["all"] = {"mean": torch.randn(5 << 20)}
        return model, optimizer

    model, optimizer = build(0)
    path = writer.write(LiveState(model, {"": optimizer}, head=HEAD).capture())
    other, fresh = build(1)
    restore_weights(load(path).states, other, {"": fresh})
    assert torch.equal(fresh.state["all"]["mean"], optimizer.state["all"]["mean"])
    assert str(path) not in mapped_files()


def test_the_loaded_tensors_are_those_that_were_saved(writer):
    base = torch.arange(24, dtype=torch.float64)
    extra = {
        "same": [base, base],
        "bytes": (torch.tensor([True, False]), torch.tensor(3), torch.zeros(3, dtype=torch.bfloat16)),
        "empty": torch.empty(0, 7),
        5: {"not a tensor": 0.1, "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    }

    def comparable(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape, value.stride(), value.tolist()
        if isinstance(value, dict):
            return {key: comparable(item) for key, item in value.items()}
        return [type(value), *map(comparable, value)] if isinstance(value, list | tuple) else value

    model = nn.Linear(1, 1)
    found = load(
        writer.write(LiveState(model, {"": torch.optim.SGD(model.parameters())}, extra=extra, head=HEAD).capture())
    ).extra
    assert comparable(found) == comparable(extra)
    found["same"][0][4] = -1.0
    assert found["same"][1][4] == -1.0
    assert (
        load(
            writer.write(LiveState(model, {"": torch.optim.SGD(model.parameters())}, extra=extra, head=HEAD).capture())
        ).extra["same"][0][4]
        == 4.0
    ), "the file isn't written to"


@pytest.mark.parametrize("harm", [lambda file: file.write_bytes(file.read_bytes()[:-100]), Path.unlink])
def test_a_file_that_was_removed_or_cut_off_meanwhile_is_an_error_of_ours(writer, snapshot, harm):
    path = writer.write(snapshot(1))
    harm(path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt can't be loaded"):
        load(path, verified=True)


def test_a_misfit_names_the_checkpoint(writer, snapshot):
    path = writer.write(snapshot(1))
    with pytest.raises(
        CheckpointError, match=rf"^{path}: the checkpoint doesn't fit the model: only in the checkpoint"
    ):
        restore_weights(load(path).states, torch.nn.Linear(6, 5))


def test_a_scaler_that_wasn_t_saved_starts_afresh_with_a_warning(writer, snapshot, trained, caplog):
    path = writer.write(snapshot(1))
    model, optimizer = trained()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    restore_weights(load(path).states, model, {"": optimizer}, {"": scaler})
    assert scaler.get_scale() == 4.0
    assert "the scale starts afresh" in caplog.text
    caplog.clear()
    restore_weights(load(path).states, model, {"": optimizer}, {"": torch.amp.GradScaler("cpu", enabled=False)})
    assert not caplog.messages


@pytest.mark.parametrize("was_named", [True, False])
def test_a_scale_starts_afresh_if_one_loss_becomes_several_or_the_reverse(writer, trained, caplog, was_named):
    def scalers_of(named, scale):
        return {"critic" if named else "": torch.amp.GradScaler("cpu", init_scale=scale)}

    model, optimizer = trained()
    head = Head(step=3, samples_seen=24, world_size=1, config_digest="c0")
    state = LiveState(model, {"": optimizer}, scalers=scalers_of(was_named, 64.0), head=head, rng=[rng_state()])
    found = load(writer.write(state.capture()))
    scalers = scalers_of(not was_named, 4.0)
    restore_weights(found.states, model, {"": optimizer}, scalers)
    assert scalers["" if was_named else "critic"].get_scale() == 4.0
    assert "the scale starts afresh" in caplog.text


def test_a_checkpoint_of_an_earlier_version_is_restored(trained):
    assert find_damage(FORMAT_1) == ""
    model, optimizer = trained(seed=5, steps=0)
    scaler = torch.amp.GradScaler("cpu")
    found = load(FORMAT_1)
    restore_weights(found.states, model, {"": optimizer}, {"": scaler})
    restore_rng(found.state["rng"][0])
    assert weights_digest(model.state_dict()) == read_manifest(FORMAT_1)["weights_digest"]
    saved = torch.load(FORMAT_1 / "optimizer.pt", weights_only=True)
    assert optimizer.param_groups[0]["lr"] == saved["param_groups"][0]["lr"] == 0.05
    for number, parameter in enumerate(model.parameters()):
        for name, value in saved["state"][number].items():
            assert torch.equal(optimizer.state[parameter][name], value)
    assert scaler.get_scale() == 64.0
    assert (found.step, found.world_size, found.state["config_digest"]) == (3, 1, "c0")
    assert found.state["score"] == {"name": "loss", "mode": "min", "value": 0.5}
    assert found.extra["meter"] == {"train/loss": (1.5, 3)}
    assert torch.equal(found.extra["ema"]["0.weight"], model[0].weight)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in read_weights(FORMAT_1).items())
    exchange = read_weights(FORMAT_1 / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in exchange.items())


ALONE = World(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),))


@dataclass(frozen=True, kw_only=True)
class ElsewhereInTheWorld(World):
    """A rank to which rank zero has sent that it needs no help to verify, and then its choice."""

    chosen: Path
    sent: list = field(default_factory=list)

    def broadcast(self, value):
        self.sent.append(value)
        return None if len(self.sent) == 1 else (str(self.chosen), None, False)


def test_rank_zero_verifies_once(directory, writer, snapshot, monkeypatch):
    path = writer.write(snapshot(1))
    monkeypatch.setattr("hpctrain.checkpoint.read.find_damage", lambda path: pytest.fail("verified again"))
    assert load_newest(directory, ALONE).path == path


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "state.pt"])
def test_a_node_that_reads_other_bytes_than_rank_zero_finds_out(directory, writer, snapshot, name):
    path = writer.write(snapshot(1))
    flip(path / name, 0.5)
    rank = ElsewhereInTheWorld(rank=2, local_rank=0, size=4, devices=(torch.device("cpu"),), chosen=path)
    with pytest.raises(CheckpointUnlikeError, match=rf"{name} doesn't match .* rank zero read it intact"):
        load_newest(directory, rank)


def test_only_the_first_rank_of_a_node_verifies(directory, writer, snapshot, monkeypatch):
    path = writer.write(snapshot(1))
    verified = []
    monkeypatch.setattr("hpctrain.checkpoint.read.find_damage", lambda path: verified.append(path) or "")
    place = {"size": 4, "devices": (torch.device("cpu"),), "chosen": path}
    load_newest(directory, ElsewhereInTheWorld(rank=3, local_rank=1, **place))
    assert not verified
    load_newest(directory, ElsewhereInTheWorld(rank=2, local_rank=0, **place))
    assert verified == [path]
