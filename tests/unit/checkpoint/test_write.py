from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from hpctrain.checkpoint.read import choose_newest, load
from hpctrain.checkpoint.retention import Retention, remove_leftovers
from hpctrain.checkpoint.state import Head, LiveState, weights_digest
from hpctrain.checkpoint.warm_start import read_weights
from hpctrain.checkpoint.write import CheckpointWriter
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.errors import CheckpointError, SupersededError
from hpctrain.run.checkpoint_manifest import MANIFEST, read_manifest
from hpctrain.run.checkpoints import find_damage, list_checkpoints
from tests.support import full_disk


def names(directory):
    return sorted(path.name for path in directory.checkpoints.iterdir())


def steps(directory):
    return [info.step for info in list_checkpoints(directory) if info.intact]


def test_what_is_written_is_published_intact(directory, writer, snapshot):
    path = writer.write(snapshot(5))
    assert path == directory.checkpoint(5)
    (info,) = list_checkpoints(directory)
    assert (info.intact, info.step, info.samples_seen) == (True, 5, 40)
    assert info.time == pytest.approx(time.time(), abs=60)
    assert names(directory) == ["step_00000005"]


def test_torchs_own_checksums_are_left_as_they_were(writer, snapshot):
    writer.write(snapshot(1))
    assert torch.serialization.get_crc32_options()


def test_a_checkpoint_of_the_same_step_is_replaced(directory, writer, snapshot):
    before = list_checkpoints(directory)
    for seed in (1, 2):
        writer.write(snapshot(3, seed=seed))
        (info,) = list_checkpoints(directory)
        assert info.intact
        assert info not in before
        before = [info]
    assert names(directory) == ["step_00000003"]


def test_a_damaged_one_in_the_way_is_replaced(directory, writer, snapshot, caplog):
    (writer.write(snapshot(3)) / MANIFEST).unlink()
    assert find_damage(writer.write(snapshot(3))) == ""
    assert [name[:22] for name in names(directory)] == ["replaced-step_00000003", "step_00000003"]
    assert "contains a user's files" in caplog.text


def test_an_attempt_superseded_before_it_writes_writes_nothing(directory, writer, snapshot, claim):
    claim.ledger.claim()
    with pytest.raises(SupersededError):
        writer.write(snapshot(1))
    assert names(directory) == []


@pytest.mark.parametrize("safetensors", [False, True])
@pytest.mark.parametrize("cleaned", [False, True], ids=["at the end", "whose directory the later one removed"])
def test_an_attempt_superseded_while_it_writes_publishes_nothing(directory, snapshot, claim, cleaned, safetensors):
    def check():
        claim.require_ownership()
        # the first check comes before anything is written; from then on a later attempt owns the run
        claim.ledger.claim()
        if cleaned:
            remove_leftovers(directory)

    writer = CheckpointWriter(directory, SimpleNamespace(require_ownership=check, attempt=1), safetensors=safetensors)
    with pytest.raises(SupersededError):
        writer.write(snapshot(1))
    assert names(directory) == []


FAULTS = ["mkdir", "open", "write", "fsync", "rename"]


@pytest.fixture
def faulty(monkeypatch):
    """Makes one call of an operating system's function fail: the n-th from now on, counted from 1."""

    def arm(name, count, code=errno.EIO):
        real, calls = getattr(os, name), []

        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) == count:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
        return calls

    yield arm
    monkeypatch.undo()


@pytest.mark.parametrize("name", FAULTS)
def test_any_call_that_fails_leaves_all_or_nothing_and_training_can_continue(
    directory, writer, snapshot, faulty, monkeypatch, name
):
    writer.write(snapshot(1))
    new = snapshot(2)
    calls = faulty(name, 0)
    writer.write(new)
    # the last file that is opened only records the save
    total = len(calls) - (name == "open")
    assert total >= 1
    for count in range(1, total + 1):
        monkeypatch.undo()
        for path in directory.checkpoints.glob("step_00000002"):
            path.rename(directory.path / f"{name}{count}")
        faulty(name, count)
        with pytest.raises(CheckpointError, match=r"step 2 can't be written to .*step_00000002: Input/output error"):
            writer.write(new)
        monkeypatch.undo()
        assert set(names(directory)) <= {"step_00000001", "step_00000002"}
        assert all(info.intact for info in list_checkpoints(directory))
        assert find_damage(writer.write(new)) == ""


@pytest.mark.parametrize("name", ["mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"])
def test_any_call_that_fails_while_one_is_replaced_leaves_the_old_or_the_new(
    directory, writer, snapshot, faulty, monkeypatch, name
):
    writer.write(snapshot(1))
    writer.write(snapshot(2, seed=1))
    other = snapshot(2, seed=2)
    calls = faulty(name, 0)
    writer.write(other)
    seen = set()
    for count in range(1, len(calls) + 1):
        monkeypatch.undo()
        writer.write(snapshot(2, seed=1))
        faulty(name, count)
        with suppress(CheckpointError):  # once the new one has its name, a failure is a warning
            writer.write(other)
        monkeypatch.undo()
        remove_leftovers(directory)
        infos = list_checkpoints(directory)
        assert [(info.step, info.intact) for info in infos] == [(1, True), (2, True)]
        seen.add(infos[1].weights_digest)
    assert seen <= {weights_digest(snapshot(2, seed=seed).model) for seed in (1, 2)}
    assert calls


def test_all_is_durable_before_it_has_its_name(directory, writer, snapshot, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(Path(f"/proc/self/fd/{fd}").readlink()), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    writer.write(snapshot(1))
    *files, manifest, inside, named, outside = done
    assert {path.name for path in files} == {"model.pt", "optimizer.pt", "state.pt"}
    assert {path.parent for path in files} == {inside}
    assert (manifest, named, outside) == (inside / MANIFEST, "rename", directory.checkpoints)


def test_a_full_disk_is_one_clear_error_and_leaves_no_trace(directory, writer, snapshot):
    writer.write(snapshot(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 can't .*: File too large; earlier .* allows 2 kB"):
            writer.write(snapshot(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(directory) == ["step_00000001"]
    assert steps(directory) == [1]


@pytest.fixture
def small_disk(directory):
    with full_disk.small_disk(directory.checkpoints, "size=128k"):
        yield directory


def test_a_disk_without_files_is_not_called_full_of_bytes(directory, writer, snapshot):
    with full_disk.small_disk(directory.checkpoints, "size=8m,nr_inodes=20") as folder:
        with pytest.raises(CheckpointError) as raised:
            list(map(writer.write, map(snapshot, range(1, 9))))
        assert f"{folder} is out of files: " in str(raised.value)
        assert re.search(
            r"MB are free, but (no|only \d) more files? \(inodes\) can be created; `df -i ", str(raised.value)
        )
        assert "without the new checkpoint, " in str(raised.value)
        assert "is out of space" not in str(raised.value)
        assert len(steps(directory)) == 3


def test_a_disk_that_fills_up_keeps_what_it_has(small_disk, writer, snapshot):
    snapshots = [snapshot(step) for step in range(1, 9)]
    with pytest.raises(CheckpointError, match="No space left on device"):
        list(map(writer.write, snapshots))
    kept = steps(small_disk)
    assert kept[0] == 1
    assert names(small_disk) == [f"step_{step:08d}" for step in kept]
    assert load(choose_newest(small_disk)[0]).step == kept[-1]


def test_a_full_disk_names_what_is_free_and_what_can_be_removed(small_disk, writer, snapshot):
    with pytest.raises(CheckpointError, match="No space left on device") as raised:
        list(map(writer.write, map(snapshot, range(1, 9))))
    *older, _, _ = list_checkpoints(small_disk, verify=False)
    names_and_sizes = ", ".join(f"{info.path} ({info.bytes / 1e3:.3g} kB)" for info in sorted_by_size(older))
    assert "are free; older checkpoints, the largest first, of which" in str(raised.value)
    assert f"need: {names_and_sizes}; checkpoint.keep" in str(raised.value)
    free = re.search(r"; without the new checkpoint, (\S+) kB are free", str(raised.value))
    system = os.statvfs(small_disk.checkpoints)
    assert float(free[1]) * 1e3 == pytest.approx(system.f_bavail * system.f_frsize, rel=0.01)


def sorted_by_size(found):
    return sorted(found, key=lambda info: (-info.bytes, info.path))


@pytest.mark.parametrize("safetensors", [True, False])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(directory, claim, safetensors):
    model = nn.Linear(300, 300)
    model.tied = model.weight
    head = Head(step=1, samples_seen=0, world_size=1, config_digest="")
    live = LiveState(model, {"": torch.optim.SGD(model.parameters())}, head=head, extra={"ema": [torch.zeros(90_000)]})
    writer = CheckpointWriter(directory, claim, safetensors=safetensors)
    path = writer.write(live.capture())
    written = sum(file.stat().st_size for file in path.iterdir())
    assert writer.size_of(live.capture()) == pytest.approx(written, rel=0.05)


def test_a_disk_that_became_read_only_keeps_what_it_has(small_disk, writer, snapshot):
    writer.write(snapshot(1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk.checkpoints], check=True)
    with pytest.raises(CheckpointError, match=f"Read-only file system; .*; {small_disk.checkpoints} is read-only, "):
        writer.write(snapshot(2))
    assert load(choose_newest(small_disk)[0]).step == 1
    subprocess.run(["mount", "-o", "remount,rw", small_disk.checkpoints], check=True)
    assert find_damage(writer.write(snapshot(2))) == ""


def test_a_folder_that_was_removed_is_made_again(directory, writer, snapshot, caplog):
    writer.write(snapshot(1))
    shutil.rmtree(directory.checkpoints)
    assert find_damage(writer.write(snapshot(2))) == ""
    assert f"{directory.checkpoints} was removed" in caplog.text
    assert stat.S_IMODE(directory.checkpoints.stat().st_mode) == 0o750


def test_a_run_directory_that_was_removed_is_one_clear_error(directory, writer, snapshot):
    shutil.rmtree(directory.path)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        writer.write(snapshot(1))
    assert not directory.path.exists()


@pytest.fixture
def exchange(directory, claim):
    """Write a model's tensors as model.safetensors in a checkpoint, and return the file."""
    writer = CheckpointWriter(directory, claim, safetensors=True)

    def write(tensors):
        snapshot = LiveState(nn.Linear(1, 1), {"": torch.optim.SGD([torch.zeros(1)])}, head=HEAD).capture()
        snapshot.model.clear()
        snapshot.model.update(tensors)
        return writer.write(snapshot) / "model.safetensors"

    return write


HEAD = Head(step=1, samples_seen=1, world_size=1, config_digest="c")


def same_bits(one, other):
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def test_safetensors_hold_every_dtype_and_shape(exchange):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]
    state = {str(kind): torch.arange(7).to(kind) for kind in kinds}
    state |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "eight bits": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "view": torch.arange(10.0)[::3],
        "complex": torch.tensor([1 + 2j]),
        "näme": torch.ones(1),
    }
    found = load_file(exchange(state))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert same_bits(found[name], tensor)


@pytest.mark.parametrize("weight", [torch.randn(3, 3), torch.randn(3, 2).t()], ids=["contiguous", "transposed"])
def test_safetensors_hold_tied_weights_under_each_name_and_no_other_state(exchange, weight):
    state = {"a": weight, "b": weight, "rows": weight[1:]}
    found = load_file(exchange({**state, "_extra_state": {"calls": 7}}))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_dtype_that_safetensors_lacks_is_refused(directory, exchange):
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*complex128.*checkpoint\.safetensors=false"):
        exchange({"w": torch.zeros(1, dtype=torch.complex128)})
    assert names(directory) == []


def test_a_tensor_without_memory_is_refused(directory, exchange):
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*invalid shape.*checkpoint\.safetensors=false"):
        exchange({"w": torch.zeros(1, device="meta")})
    assert names(directory) == []


def test_a_full_disk_under_safetensors_is_one_clear_error(directory, exchange):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 1 can't be written to .*File too large"):
            exchange({"w": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(directory) == []


def test_safetensors_are_readable_by_whom_the_umask_allows(exchange):
    before = os.umask(0o027)
    try:
        file = exchange({"w": torch.zeros(1)})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in file.parent.iterdir()} == {0o640}


def test_safetensors_have_plain_names_and_a_checksum(directory, claim, snapshot, trained):
    writer = CheckpointWriter(directory, claim, safetensors=True)
    path = writer.write(snapshot(1))
    file = path / "model.safetensors"
    assert read_manifest(path)["files"].keys() == {"model.pt", "model.safetensors", "optimizer.pt", "state.pt"}
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it isn't a mapping
    expected = torch.load(path / "model.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read_weights(file).items())
    model, _ = trained(seed=9)
    model.load_state_dict(found)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    (info,) = list_checkpoints(directory)
    assert "model.safetensors doesn't match its checksum" in info.problem
    retention = Retention(directory, claim, Checkpoint())
    for step in (2, 3, 4):
        writer.write(snapshot(step))
        retention.apply(step)
    assert directory.checkpoint_steps() == [3, 4]


def test_safetensors_leave_out_the_names_of_wrappers(directory, claim, trained):
    model, optimizer = trained()
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    path = CheckpointWriter(directory, claim, safetensors=True).write(
        LiveState(wrapped, {"": optimizer}, head=HEAD).capture()
    )
    assert load_file(path / "model.safetensors").keys() == model.state_dict().keys()
