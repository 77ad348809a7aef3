"""A run keeps its identity when it is moved; a copy gets its own."""

from __future__ import annotations

import json
import shutil

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import move_records_aside
from hpctrain.sync.sent_run import identify, identity_path


@pytest.fixture
def made_run(tmp_path):
    """Makes a run of a sweep."""

    def make(name):
        directory = RunDirectory.at(tmp_path / "sweep" / name)
        directory.create(0o750)
        directory.manifest.write_text(json.dumps({"command": "python -m hpctrain", "time": 1000.5}))
        return directory

    return make


def copied(directory, path):
    shutil.copytree(directory.path, path)
    return RunDirectory.at(path)


def moved(directory, path):
    directory.path.rename(path)
    return RunDirectory.at(path)


def test_runs_of_a_sweep_differ(made_run):
    digest = identify(made_run("0"))
    assert len(digest) == 16
    assert identify(made_run("1")) != digest


def test_a_moved_run_keeps_its_digest(made_run, tmp_path):
    first = made_run("0")
    digest = identify(first)
    second = moved(first, tmp_path / "renamed")
    assert identify(second) == digest
    assert identify(moved(second, tmp_path / "again")) == digest


def test_without_a_record_the_digest_is_that_of_the_manifest_and_the_folder(made_run, tmp_path):
    directory = made_run("0")
    digest = identify(directory)
    identity_path(directory).write_text("{")
    assert identify(directory) == digest
    identity_path(directory).unlink()
    assert identify(moved(directory, tmp_path / "0")) == digest


def test_a_run_that_started_over_is_a_new_one_at_the_services(made_run):
    directory = made_run("0")
    digests = [identify(directory)]
    for attempt in (2, 4):
        move_records_aside(directory, attempt)
        digests.append(identify(directory))
        assert identify(directory) == digests[-1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("name", ["0", "copy"])
def test_a_copy_gets_a_digest_of_its_own_and_keeps_it(made_run, tmp_path, name):
    original = made_run("0")
    digest = identify(original)
    copy = copied(original, tmp_path / name)
    own = identify(copy)
    assert len({digest, own, identify(copied(copy, tmp_path / "of_the_copy"))}) == 3
    assert identify(original) == digest
    shutil.rmtree(original.path)
    assert identify(moved(copy, tmp_path / "moved")) == own


def test_a_copy_whose_original_was_removed_was_moved(made_run, tmp_path):
    original = made_run("0")
    digest = identify(original)
    copy = copied(original, tmp_path / "copy")
    shutil.rmtree(original.path)
    assert identify(copy) == digest


def test_a_run_under_two_paths_is_one(made_run, tmp_path):
    directory = made_run("0")
    digest = identify(directory)
    (tmp_path / "link").symlink_to(directory.path.parent)
    linked = RunDirectory.at(tmp_path / "link" / "0")
    assert identify(linked) == digest
    assert identify(directory) == digest
