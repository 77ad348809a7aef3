from __future__ import annotations

import subprocess

import pytest

from hpctrain.run import manifest as manifest_module
from hpctrain.run.manifest import manifest


@pytest.fixture
def repository(tmp_path):
    def git(*words):
        identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "train.py").write_text("lr = 1\n")
    git("add", "train.py")
    git("commit", "-m", "first")
    return tmp_path


def test_the_commit_and_what_was_changed_since(repository):
    (repository / "train.py").write_text("lr = 2\n")
    found = manifest(["python", "-m", "hpctrain", "name=a b"], repository)
    assert found["command"] == "python -m hpctrain 'name=a b'"
    assert len(found["git"]["commit"]) == 40
    assert "+lr = 2" in found["git"]["diff"]
    assert not found["git"]["diff_left_out"]


def test_a_large_diff_is_left_out(repository, monkeypatch):
    monkeypatch.setattr(manifest_module, "LARGEST_DIFF_BYTES", 10)
    (repository / "train.py").write_text("lr = 2\n")
    assert manifest([], repository)["git"] | {"commit": ""} == {"commit": "", "diff": "", "diff_left_out": True}


def test_a_folder_without_a_repository(tmp_path):
    assert manifest([], tmp_path)["git"] is None


def test_the_environment_is_not_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    assert "hunter2" not in str(manifest([], tmp_path))
