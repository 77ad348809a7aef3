from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.digest import weights_digest
from hpctrain.checkpoint.reader import choose_newest, load
from hpctrain.checkpoint.removal import remove_leftovers
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.writer import CheckpointWriter
from hpctrain.errors import CheckpointError, SupersededError
from hpctrain.run.checkpoints import MANIFEST, list_checkpoints, verify
from hpctrain.run.ledger import Ledger


def names(directory):
    return sorted(path.name for path in directory.checkpoints.iterdir())


def steps(directory):
    return [info.step for info in list_checkpoints(directory) if info.intact]


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_what_is_written_is_published_intact(directory, writer, snapshot):
    path = writer.write(snapshot(5))
    assert path == directory.checkpoint(5)
    (info,) = list_checkpoints(directory)
    assert (info.intact, info.step, info.samples_seen, info.time) == (True, 5, 40, 1000.0)
    assert names(directory) == ["step_00000005"]


def test_torchs_own_checksums_are_left_as_they_were(writer, snapshot):
    writer.write(snapshot(1))
    assert torch.serialization.get_crc32_options()


def test_old_ones_go_once_newer_ones_are_there(directory, snapshot):
    writer = CheckpointWriter(directory, lambda: None, Retention(keep_every=4))
    for step in range(1, 8):
        writer.write(snapshot(step))
    assert steps(directory) == [4, 6, 7]
    writer.write(snapshot(8), retain=False)
    assert steps(directory) == [4, 6, 7, 8]
    assert names(directory) == [f"step_{step:08d}" for step in (4, 6, 7, 8)]


def test_the_last_two_intact_stay_though_one_between_was_damaged_in_silence(directory, snapshot, caplog):
    writer = CheckpointWriter(directory, lambda: None, Retention())
    writer.write(snapshot(1))
    writer.write(snapshot(2))
    flip(directory.checkpoint(2) / "model.pt")
    writer.write(snapshot(3))
    assert steps(directory) == [1, 3]
    assert "step_00000002 is not intact (model.pt doesn't match its checksum" in caplog.text
    writer.write(snapshot(4))
    assert names(directory) == ["step_00000003", "step_00000004"]


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
    assert verify(writer.write(snapshot(3))) == ""
    assert [name[:22] for name in names(directory)] == ["replaced-step_00000003", "step_00000003"]
    assert "holds what hpctrain did not write" in caplog.text


def test_an_attempt_superseded_before_it_writes_writes_nothing(directory, snapshot):
    ledger = Ledger(directory)
    first = ledger.claim()
    ledger.claim()
    with pytest.raises(SupersededError):
        CheckpointWriter(directory, lambda: ledger.require_ownership(first), Retention()).write(snapshot(1))
    assert names(directory) == []


@pytest.mark.parametrize("cleaned", [False, True], ids=["beside it", "whose directory the later one removed"])
def test_an_attempt_superseded_while_it_writes_publishes_nothing(directory, snapshot, cleaned):
    ledger = Ledger(directory)
    first = ledger.claim()

    def check():
        ledger.require_ownership(first)
        # the first question is asked before anything is written; from then on a later attempt owns the run
        ledger.claim()
        if cleaned:
            remove_leftovers(directory)

    with pytest.raises(SupersededError):
        CheckpointWriter(directory, check, Retention()).write(snapshot(1))
    assert names(directory) == []


def test_a_superseded_attempt_removes_nothing(directory, snapshot):
    ledger = Ledger(directory)
    attempt = ledger.claim()
    asked = []

    def check():
        ledger.require_ownership(attempt)
        asked.append(1)
        if len(asked) == 8:
            ledger.claim()

    writer = CheckpointWriter(directory, check, Retention())
    for step in (1, 2, 3):
        writer.write(snapshot(step), retain=False)
    with pytest.raises(SupersededError):
        writer.write(snapshot(4))
    assert steps(directory) == [1, 2, 3, 4]


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
def test_any_call_that_fails_leaves_all_or_nothing_and_training_can_go_on(
    directory, writer, snapshot, faulty, monkeypatch, name
):
    writer.write(snapshot(1))
    new = snapshot(2)
    calls = faulty(name, 0)
    writer.write(new)
    total = len(calls)
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
        assert verify(writer.write(new)) == ""


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
        with pytest.raises(CheckpointError, match=r"step 2 can't be written to .*: File too large; earlier"):
            writer.write(snapshot(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(directory) == ["step_00000001"]
    assert steps(directory) == [1]


@pytest.fixture
def small_disk(directory):
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", directory.checkpoints], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("no mounting here")
    yield directory
    subprocess.run(["umount", directory.checkpoints], check=True)


def test_a_disk_that_fills_up_keeps_what_it_has(small_disk, writer, snapshot):
    snapshots = [snapshot(step) for step in range(1, 9)]
    with pytest.raises(CheckpointError, match="No space left on device"):
        list(map(writer.write, snapshots))
    kept = steps(small_disk)
    assert kept[0] == 1
    assert names(small_disk) == [f"step_{step:08d}" for step in kept]
    assert load(choose_newest(small_disk)).step == kept[-1]


def test_a_disk_that_became_read_only_keeps_what_it_has(small_disk, writer, snapshot):
    writer.write(snapshot(1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk.checkpoints], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        writer.write(snapshot(2))
    assert load(choose_newest(small_disk)).step == 1
    subprocess.run(["mount", "-o", "remount,rw", small_disk.checkpoints], check=True)
    assert verify(writer.write(snapshot(2))) == ""


def test_a_folder_that_was_removed_is_made_again(directory, writer, snapshot, caplog):
    writer.write(snapshot(1))
    shutil.rmtree(directory.checkpoints)
    assert verify(writer.write(snapshot(2))) == ""
    assert f"{directory.checkpoints} was removed" in caplog.text
    assert stat.S_IMODE(directory.checkpoints.stat().st_mode) == 0o750


def test_a_run_directory_that_was_removed_is_one_clear_error(directory, writer, snapshot):
    shutil.rmtree(directory.path)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        writer.write(snapshot(1))
    assert not directory.path.exists()


def test_removal_that_fails_is_a_warning(directory, snapshot, monkeypatch, caplog):
    writer = CheckpointWriter(directory, lambda: None, Retention())
    writer.write(snapshot(1))
    writer.write(snapshot(2))
    unlink = os.unlink

    def refuse(path, **kwargs):
        if not str(path).startswith("/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    writer.write(snapshot(3))
    monkeypatch.undo()
    assert "old checkpoints can't be removed" in caplog.text
    assert steps(directory) == [2, 3]
    assert [name[:26] for name in remove_leftovers(directory)] == [".tmp-removed-step_00000001"]
    assert names(directory) == ["step_00000002", "step_00000003"]
