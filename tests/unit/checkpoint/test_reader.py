from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.checkpoint.reader import choose_newest, load
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.rng import restore_rng, rng_state
from hpctrain.checkpoint.state import Head, capture
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.errors import CheckpointDamagedError, CheckpointError
from hpctrain.run.checkpoints import MANIFEST, verify


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
    assert choose_newest(directory) == directory.checkpoint(2)
    (warning,) = [record for record in caplog.records if record.name == "hpctrain.checkpoint"]
    assert f"resuming from {directory.checkpoint(2)}" in warning.getMessage()
    assert f"{directory.checkpoint(3)} (" in warning.getMessage()
    assert name in warning.getMessage() or MANIFEST in warning.getMessage()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "optimizer.pt", "state.pt", MANIFEST])
def test_a_flipped_bit_is_found_wherever_it_is(directory, snapshot, name):
    """In a header, in a tensor, in padding, in the zip directory, in the record of the sums themselves."""
    path = CheckpointWriter(directory, lambda: None, Retention(), safetensors=True).write(snapshot(1))
    data = (path / name).read_bytes()
    positions = sorted({*range(0, len(data), 61), *range(min(64, len(data))), *range(len(data) - 64, len(data))})
    for number, position in enumerate(positions):
        flipped = bytearray(data)
        flipped[position] ^= 1 << number % 8
        (path / name).write_bytes(flipped)
        assert verify(path), position
    (path / name).write_bytes(data)
    assert not verify(path)


def test_with_none_intact_the_error_names_all_and_what_to_do(directory, writer, snapshot):
    for step in (1, 2):
        flip(writer.write(snapshot(step)) / "model.pt", 0.5)
    with pytest.raises(CheckpointDamagedError) as caught:
        choose_newest(directory)
    text = str(caught.value)
    assert str(directory.checkpoint(1)) in text
    assert str(directory.checkpoint(2)) in text
    assert f"move {directory.checkpoints} away" in text


def test_a_run_without_checkpoints_starts_from_nothing(directory):
    assert choose_newest(directory) is None


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
    snapshot = capture(
        model,
        optimizer,
        scaler,
        {"best": float("inf")},
        head=Head(step=3, samples_seen=24, world_size=1, config_digest="c0"),
        rng=[rng_state()],
    )
    path = writer.write(snapshot)
    straight = future(model, optimizer, scaler)

    model, optimizer = trained(seed=5, steps=0)
    scaler = torch.amp.GradScaler("cpu")
    found = load(path)
    found.restore(model, optimizer, scaler)
    restore_rng(found.rng[0])
    assert (found.step, found.samples_seen, found.world_size, found.config_digest) == (3, 24, 1, "c0")
    assert found.extra == {"best": float("inf")}
    assert all(map(torch.equal, straight, future(model, optimizer, scaler)))


def test_a_large_file_is_mapped_and_the_restored_optimizer_outlives_it(writer):
    model = torch.nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    path = writer.write(
        capture(
            model,
            optimizer,
            head=Head(step=1, samples_seen=1, world_size=1, config_digest="c0"),
        )
    )
    found = load(path)
    found.restore(model, optimizer)
    mapped = str(path / "optimizer.pt")

    def maps():
        return Path("/proc/self/maps").read_text()

    assert mapped in maps()
    del found
    assert mapped not in maps()


def test_a_misfit_names_the_checkpoint(writer, snapshot):
    path = writer.write(snapshot(1))
    with pytest.raises(
        CheckpointError, match=rf"^{path}: the checkpoint doesn't fit the model: only in the checkpoint"
    ):
        load(path).restore(torch.nn.Linear(6, 5))


def test_a_scaler_that_wasn_t_saved_starts_afresh_and_says_so(writer, snapshot, trained, caplog):
    path = writer.write(snapshot(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    load(path).restore(*trained(), scaler)
    assert scaler.get_scale() == 4.0
    assert "the scale starts afresh" in caplog.text
    load(path).restore(*trained(), torch.amp.GradScaler("cpu", enabled=False))
