from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import CheckpointDamagedError
from hpctrain.run.checkpoint_manifest import MANIFEST, encode_manifest, read_manifest
from hpctrain.run.checkpoints import file_checksum, find_damage, list_checkpoints, newest_intact, saved_step
from hpctrain.run.directory import RunDirectory

FILES = {"model.pt": bytes(range(256)) * 20, "optimizer.pt": b"o" * 3000, "state.pt": b"s"}


def record(step, files=FILES):
    return {
        "format_version": 1,
        "algorithm": "xxh3_128",
        "step": step,
        "samples_seen": 32 * step,
        "world_size": 4,
        "config_digest": "c0",
        "weights_digest": "d1",
        "time": 1700000000.123456,
        "files": {
            name: {"bytes": len(data), "checksum": xxhash.xxh3_128(data).hexdigest()} for name, data in files.items()
        },
    }


def put(directory, step):
    path = directory.checkpoint(step)
    path.mkdir(parents=True)
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    (path / MANIFEST).write_bytes(encode_manifest(record(step)))
    return path


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.at(tmp_path)


def flip(file, position):
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(data)


def test_the_listing_has_what_the_manifest_records(directory):
    path = put(directory, 100)
    (info,) = list_checkpoints(directory)
    assert (info.step, info.path, info.intact, info.problem) == (100, path, True, "")
    assert (info.samples_seen, info.world_size, info.time) == (3200, 4, 1700000000.123456)
    assert (info.weights_digest, info.config_digest) == ("d1", "c0")
    assert info.bytes == sum(file.stat().st_size for file in path.iterdir())


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("position", [0, 0.5, -1], ids=["header", "middle", "tail"])
def test_a_flipped_bit_is_found_and_its_file_named(directory, name, position):
    path = put(directory, 1)
    flip(path / name, position if isinstance(position, int) else len(FILES[name]) // 2)
    assert find_damage(path).startswith(f"{name} doesn't match its checksum (xxh3_128 ")
    assert [info.intact for info in list_checkpoints(directory)] == [False]


def test_every_single_flipped_bit_of_a_manifest_is_found(tmp_path):
    data = encode_manifest(record(7))
    file = tmp_path / MANIFEST
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            with pytest.raises(CheckpointDamagedError):
                read_manifest(tmp_path)


def test_every_cut_of_a_manifest_is_found(tmp_path):
    data = encode_manifest(record(7))
    for length in range(len(data)):
        (tmp_path / MANIFEST).write_bytes(data[:length])
        assert find_damage(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 2999], ids=["empty", "header alone", "one byte short"])
def test_a_cut_file_is_found_without_reading_it(directory, length):
    path = put(directory, 1)
    (path / "optimizer.pt").write_bytes(FILES["optimizer.pt"][:length])
    (info,) = list_checkpoints(directory, verify=False)
    assert info.problem == f"optimizer.pt has {length} bytes instead of 3000"
    assert find_damage(path) == info.problem


def test_every_missing_file_is_named(directory):
    path = put(directory, 1)
    for name in FILES:
        (path / name).unlink()
    assert find_damage(path) == "model.pt is missing; optimizer.pt is missing; state.pt is missing"
    (path / MANIFEST).unlink()
    assert find_damage(path) == "manifest.json is missing"
    assert find_damage(path.with_name("step_00000002")) == "no such directory"


def test_a_directory_in_place_of_a_file_is_damage(directory):
    path = put(directory, 1)
    (path / "state.pt").unlink()
    (path / "state.pt").mkdir()
    assert find_damage(path) == "state.pt is not a regular file"


def test_a_file_that_cant_be_read_is_a_problem_and_no_traceback(directory):
    path = put(directory, 1)
    (path / "state.pt").unlink()
    (path / "state.pt").symlink_to("state.pt")
    assert find_damage(path).startswith("state.pt can't be read: Too many levels of symbolic links")
    (info,) = list_checkpoints(directory)
    assert (info.intact, info.unreadable, info.damaged) == (False, True, False)


@pytest.mark.parametrize("name", [MANIFEST, "model.pt"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_checkpoint_that_the_file_system_fails_to_read_is_still_saved(directory, monkeypatch, name, number):
    for step in (30, 40):
        put(directory, step)

    def failing(call):
        def fail_or_call(path, *more, **options):
            if Path(path) == directory.checkpoint(40) / name:
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *more, **options)

        return fail_or_call

    monkeypatch.setattr(os, "open", failing(os.open))
    monkeypatch.setattr(Path, "stat", failing(Path.stat))
    assert saved_step(directory) == 40
    found, passed_over = newest_intact(directory)
    assert found is not None
    assert (found.step, [info.damaged for info in passed_over]) == (30, [False])


def test_reading_shows_how_far_it_is_of_each_checkpoint_that_is_read(directory):
    for step in (10, 20):
        put(directory, step)
    (directory.checkpoint(20) / "model.pt").write_bytes(
        bytes(len((directory.checkpoint(20) / "model.pt").read_bytes()))
    )
    seen = []
    newest_intact(directory, lambda *amounts: seen.append(amounts))
    totals = [
        sum(entry["bytes"] for entry in read_manifest(directory.checkpoint(step))["files"].values())
        for step in (20, 10)
    ]
    assert [amounts for amounts in seen if amounts[0] == amounts[1]] == [(total, total) for total in totals]


def test_a_checkpoint_that_is_damaged_is_not_saved(directory):
    for step in (10, 20, 30):
        put(directory, step)
    (directory.checkpoint(30) / "model.pt").unlink()
    (directory.checkpoint(20) / MANIFEST).write_text("")
    assert saved_step(directory) == 10
    assert [info.damaged for info in list_checkpoints(directory)] == [False, True, True]


def test_stray_files_and_foreign_names_are_passed_over(directory):
    path = put(directory, 1)
    (path / "notes.txt").write_text("mine")
    for name in ("step_1", ".tmp-step_00000002-0123abcd", "step_00000003.bak"):
        (directory.checkpoints / name).mkdir()
    assert [(info.step, info.intact) for info in list_checkpoints(directory)] == [(1, True)]


def test_a_checkpoint_under_another_steps_name_is_not_taken_for_it(directory):
    put(directory, 1).rename(directory.checkpoint(9))
    (info,) = list_checkpoints(directory)
    assert (info.intact, info.problem) == (False, "manifest.json belongs to step 1")


@pytest.mark.parametrize("change", [{"format_version": 3}, {"algorithm": "crc32"}])
def test_another_format_is_distinguished_from_damage(directory, change):
    path = put(directory, 1)
    (path / MANIFEST).write_bytes(encode_manifest(record(1) | change))
    assert "this hpctrain reads versions 1 and 2 with xxh3_128" in find_damage(path)
    (info,) = list_checkpoints(directory)
    assert (info.intact, info.other_version, info.damaged, saved_step(directory)) == (False, True, False, 0)


@pytest.mark.parametrize("change", [{"step": "7"}, {"world_size": None}, {"files": {"../x": {}}}])
def test_a_manifest_of_other_fields_is_refused(tmp_path, change):
    (tmp_path / MANIFEST).write_bytes(encode_manifest(record(1) | change))
    with pytest.raises(CheckpointDamagedError, match="lacks fields"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["null", "[]", '"x"', "{}", "[" * 100_000])
def test_json_that_is_not_a_manifest_is_damage(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointDamagedError):
        read_manifest(tmp_path)


def test_the_newest_intact_is_found_behind_damaged_ones_which_are_named(directory):
    for step in (10, 20, 30, 40):
        put(directory, step)
    flip(directory.checkpoint(40) / "model.pt", 9)
    (directory.checkpoint(30) / MANIFEST).unlink()
    flip(directory.checkpoint(10) / "model.pt", 9)
    found, damaged = newest_intact(directory)
    assert found is not None
    assert (found.step, [info.step for info in damaged]) == (20, [40, 30])
    assert all(info.problem for info in damaged)


def test_one_that_is_removed_while_it_is_read_is_not_listed(directory):
    for step in range(100):
        put(directory, step)

    def remove():
        for step in range(80):
            directory.checkpoint(step).rename(directory.checkpoints / f".tmp-removed-step_{step:08d}-0123abcd")

    remover = threading.Thread(target=remove)
    remover.start()
    listed = []
    while remover.is_alive():
        listed += list_checkpoints(directory)
    remover.join()
    listed += list_checkpoints(directory)
    assert len(listed) >= 20
    assert [info for info in listed if not info.intact] == []


def test_a_link_to_nowhere_is_named(directory):
    directory.checkpoints.mkdir()
    directory.checkpoint(3).symlink_to("nowhere")
    assert [info.problem for info in newest_intact(directory)[1]] == ["no such directory"]


def test_a_run_without_checkpoints_has_none(directory):
    assert newest_intact(directory) == (None, [])
    assert list_checkpoints(directory) == []


@settings(deadline=None)
@given(st.binary(max_size=5_000), st.integers(0, 3))
def test_the_checksum_is_that_of_all_bytes_across_chunks(tmp_path_factory, data, megabytes):
    file = tmp_path_factory.getbasetemp() / "checked"
    whole = data + b"\1" * (megabytes << 20) + data
    file.write_bytes(whole)
    assert file_checksum(file) == xxhash.xxh3_128(whole).hexdigest()


def test_it_is_all_done_without_torch_and_numpy(directory):
    put(directory, 1)
    program = (
        "import sys; from hpctrain.run.checkpoints import list_checkpoints; "
        "from hpctrain.run.directory import RunDirectory; "
        f"assert list_checkpoints(RunDirectory.at({str(directory.path)!r}))[0].intact; "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
