from __future__ import annotations

import gc
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.intake import KEPT, MAPPED_FROM_BYTES, Intake
from hpctrain.checkpoint.reader import choose_newest, load
from hpctrain.checkpoint.state import Head, capture
from hpctrain.errors import CheckpointDamagedError, CheckpointError
from hpctrain.run.checkpoints import file_checksum


def mapped(file):
    return torch.load(file, mmap=True, weights_only=True)


def maps():
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


@pytest.fixture
def save(writer):
    """Write a checkpoint whose optimizer's file is large enough to be kept; gives model, optimizer and path."""

    def write(step, seed=None):
        model, optimizer = large_model(step if seed is None else seed, lr=0.01)
        train(model, optimizer)
        head = Head(step=step, samples_seen=step, world_size=1, config_digest="c0")
        path = writer.write(capture(model, optimizer, head=head))
        assert (path / KEPT).stat().st_size >= MAPPED_FROM_BYTES
        return model, optimizer, path

    return write


@pytest.mark.parametrize("verified", [False, True])
def test_a_resume_goes_on_in_memory_of_its_own(save, verified):
    model, optimizer, path = save(1)
    straight = train(model, optimizer)
    model, optimizer = large_model(5)
    found = load(path, verified=verified, intake=Intake())
    assert found.gives_away
    assert str(path / KEPT) not in maps()
    found.restore(model, optimizer)
    taken = {tensor.data_ptr() for state in found.optimizer["state"].values() for tensor in state.values()}
    kept = {tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()}
    assert taken == kept, "nothing was copied"
    del found
    assert str(path) not in maps()
    assert all(map(torch.equal, straight, train(model, optimizer)))


def test_what_was_read_for_the_comparison_is_not_read_again(directory, save, monkeypatch):
    save(1)
    opened = []
    whole = Path.open

    def counted(file, *argv, **options):
        opened.append(file.name)
        return whole(file, *argv, **options)

    monkeypatch.setattr(Path, "open", counted)
    intake = Intake()
    load(choose_newest(directory, intake), verified=True, intake=intake)
    assert opened.count(KEPT) == 1


@pytest.mark.parametrize("where", [0, 0.3, 0.99999, 1])
def test_damage_is_found_on_the_way_and_the_one_before_is_taken(directory, save, where):
    model, optimizer, _ = save(1)
    straight = train(model, optimizer)
    *_, newest = save(2)
    with (newest / KEPT).open("r+b") as file:
        position = int(where * ((newest / KEPT).stat().st_size - 1))
        file.seek(position)
        flipped = bytes([file.read(1)[0] ^ 0x10])
        file.seek(position)
        file.write(flipped)
    intake = Intake()
    with pytest.raises(CheckpointDamagedError, match=rf"{KEPT} doesn't match its checksum"):
        load(newest, intake=intake)
    intact = choose_newest(directory, intake)
    assert intact == directory.checkpoint(1)
    model, optimizer = large_model(5)
    load(intact, verified=True, intake=intake).restore(model, optimizer)
    assert all(map(torch.equal, straight, train(model, optimizer)))


@pytest.mark.parametrize("size", [0, 1, MAPPED_FROM_BYTES - 1, MAPPED_FROM_BYTES, MAPPED_FROM_BYTES + (1 << 20) + 1])
def test_the_checksum_is_the_files(tmp_path, size):
    (tmp_path / KEPT).write_bytes(torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes())
    assert Intake().checksum(tmp_path / KEPT) == file_checksum(tmp_path / KEPT)


def test_state_in_a_wider_dtype_than_its_parameter_is_kept_once(writer):
    torch.manual_seed(0)
    model = nn.Linear(1200, 2048, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1200)).sum().backward()
    optimizer.step()
    model.bfloat16()
    path = writer.write(capture(model, optimizer, head=Head(step=1, samples_seen=1, world_size=1, config_digest="c0")))
    fresh = torch.optim.AdamW(model.parameters())
    found = load(path, intake=Intake())
    found.restore(model, fresh)
    (saved,), (kept,), (before,) = found.optimizer["state"].values(), fresh.state.values(), optimizer.state.values()
    for name in ("exp_avg", "exp_avg_sq"):
        assert kept[name].dtype == torch.float32
        assert kept[name].data_ptr() == saved[name].data_ptr()
        assert torch.equal(kept[name], before[name])


def test_a_count_that_is_kept_does_not_keep_what_was_replaced(save, own_kib):
    *_, path = save(1)
    gc.collect()
    before = own_kib()
    state = load(path, intake=Intake()).optimizer["state"]
    assert own_kib() - before > 12 * 1024
    counts = [entry["step"] for entry in state.values()]
    del state
    assert own_kib() - before < 6 * 1024
    assert counts == [2.0] * 4


def test_what_an_optimizer_keeps_for_all_its_parameters_is_its_own_too(writer):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state["all"] = {"mean": torch.randn(5 << 20)}
        return model, optimizer

    model, optimizer = build(0)
    path = writer.write(capture(model, optimizer, head=Head(step=1, samples_seen=1, world_size=1, config_digest="c0")))
    for intake in (Intake(), None):
        other, fresh = build(1)
        load(path, intake=intake).restore(other, fresh)
        assert torch.equal(fresh.state["all"]["mean"], optimizer.state["all"]["mean"])
        assert str(path) not in maps()


def test_a_file_that_is_gone_or_cut_off_meanwhile_is_an_error_of_ours(save):
    *_, path = save(1)
    intake = Intake()
    tree = torch.load(path / KEPT, mmap=True, weights_only=True)
    with (path / KEPT).open("r+b") as file:
        file.truncate(MAPPED_FROM_BYTES)
    with pytest.raises((OSError, ValueError, zipfile.BadZipFile)):
        intake.own(path / KEPT, tree)
    with pytest.raises(CheckpointError, match=rf"{KEPT} can't be loaded"):
        load(path, verified=True, intake=intake)
    (path / KEPT).unlink()
    with pytest.raises(CheckpointError, match=rf"{KEPT} can't be loaded"):
        load(path, verified=True, intake=intake)


def test_every_kind_of_tensor_comes_back_and_shares_what_it_shared(tmp_path):
    base = torch.arange(24, dtype=torch.float64)
    tree = {
        "same": [base, base[3:9], base.view(4, 6).t()],
        "bytes": (torch.tensor([True, False]), torch.tensor(3), torch.zeros(3, dtype=torch.bfloat16)),
        "empty": torch.empty(0, 7),
        5: {"not a tensor": 0.1, "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)},
    }
    torch.save([tree, torch.zeros(MAPPED_FROM_BYTES // 4)], tmp_path / KEPT)
    found, large = Intake().own(tmp_path / KEPT, mapped(tmp_path / KEPT))
    assert not large.any()
    assert str(tmp_path / KEPT) not in maps()

    def told(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape, value.stride(), value.tolist()
        if isinstance(value, dict):
            return {key: told(item) for key, item in value.items()}
        return [type(value), *map(told, value)] if isinstance(value, list | tuple) else value

    assert told(found) == told(tree)
    found["same"][0][4] = -1.0
    assert found["same"][1][1] == found["same"][2][4, 0] == -1.0
    assert found["same"][0].untyped_storage().nbytes() == base.nbytes, "a storage of its own"
    assert mapped(tmp_path / KEPT)[0]["same"][0][4] == 4.0, "the file isn't written to"


def test_a_layout_that_it_does_not_know_stays_mapped_and_is_copied(save, monkeypatch):
    model, optimizer, path = save(1)
    straight = train(model, optimizer)
    whole = zipfile.ZipFile.infolist
    monkeypatch.setattr(zipfile.ZipFile, "infolist", lambda archive: whole(archive)[:-3])
    found = load(path, intake=Intake())
    assert not found.gives_away
    model, optimizer = large_model(5)
    found.restore(model, optimizer)
    del found
    assert str(path) not in maps()
    assert all(map(torch.equal, straight, train(model, optimizer)))


def test_a_small_file_is_left_to_torch(writer, snapshot):
    found = load(writer.write(snapshot(1)), intake=Intake())
    assert not found.gives_away


def test_too_little_memory_is_said_and_is_no_damage(directory, save, monkeypatch):
    *_, path = save(1)

    def none_left(count):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("hpctrain.checkpoint.intake.huge_pages", none_left)
    intake = Intake()
    assert choose_newest(directory, intake) == path
    with pytest.raises(CheckpointError, match=rf"{KEPT} can't be loaded: .*Cannot allocate memory"):
        load(path, verified=True, intake=intake)
