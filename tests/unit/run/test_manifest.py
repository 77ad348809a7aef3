from __future__ import annotations

import json
import os
import shutil
import subprocess
import zlib

import pytest

from hpctrain.files import write_json
from hpctrain.run import manifest as manifest_module
from hpctrain.run import source_folder
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import HEAD_BYTES, as_typed, manifest, read_varied, value_text


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
    tree = subprocess.check_output(["git", "-C", repository, "rev-parse", "HEAD^{tree}"], text=True)
    assert found["git"]["tree"] == tree.strip()
    assert "+lr = 2" in found["git"]["diff"]
    assert not found["git"]["diff_left_out"]


def test_the_diff_has_nothing_of_files_that_hold_secrets(repository):
    def git(*words):
        subprocess.run(["git", "-C", repository, *words], check=True, capture_output=True)

    (repository / "conf").mkdir()
    for name in (".env", "conf/secrets.yaml", "old.pem"):
        (repository / name).write_text("PASSWORD=before\nmore\nmore\nmore\n")
    git("add", "-f", ".")
    git("-c", "user.name=me", "-c", "user.email=me@example.org", "commit", "-qm", "second")
    (repository / ".env").write_text("PASSWORD=after\n")
    (repository / "conf" / "secrets.yaml").unlink()
    git("mv", "old.pem", "new.pem")
    (repository / "new.key").write_text("PASSWORD=new\n")
    git("add", "-Nf", "new.key")
    (repository / "train.py").write_text("lr = 2\n")
    for folder in (repository, repository / "conf"):
        folder.mkdir(exist_ok=True)
        diff = manifest([], folder)["git"]["diff"]
        assert "+lr = 2" in diff
        assert "PASSWORD" not in diff


def test_a_large_diff_is_left_out(repository, monkeypatch):
    monkeypatch.setattr(source_folder, "LARGEST_DIFF_BYTES", 10)
    (repository / "train.py").write_text("lr = 2\n")
    found = manifest([], repository)["git"]
    assert (found["diff"], found["diff_left_out"]) == ("", True)


@pytest.fixture
def hostile(repository, monkeypatch):
    """A repository whose author wants to run a program when somebody else starts a run in it."""
    marks = repository / "marks"
    marks.mkdir()

    def program(name):
        path = repository / f"{name}.sh"
        path.write_text(f"#!/bin/sh\ntouch {marks}/{name}\n")
        path.chmod(0o755)
        return str(path)

    def configure(key, value):
        subprocess.run(["git", "-C", repository, "config", key, value], check=True, capture_output=True)

    hooks = repository / "hooks"
    hooks.mkdir()
    for hook in ("post-index-change", "post-checkout"):
        (hooks / hook).symlink_to(program(f"hook_{hook}"))
    (repository / ".gitattributes").write_text("*.py diff=evil filter=evil\n")
    (repository / "train.py").write_text("lr = 2\n")
    for key in ("core.pager", "core.sshCommand", "diff.external", "diff.evil.command", "diff.evil.textconv"):
        configure(key, program(key))
    for key in ("filter.evil.clean", "filter.evil.smudge"):
        configure(key, program(key))
    configure("filter.evil.required", "true")
    configure("protocol.ext.allow", "always")
    configure("remote.origin.url", f"ext::{program('transport')}")
    configure("remote.origin.promisor", "true")
    configure("core.hooksPath", str(hooks))
    configure("core.fsmonitor", program("core.fsmonitor"))
    for variable in ("GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_SSH_COMMAND", "GIT_PROXY_COMMAND"):
        monkeypatch.setenv(variable, program(variable))
    return marks


def executed(marks):
    names = sorted(path.name for path in marks.iterdir())
    for name in names:
        (marks / name).unlink()
    return names


@pytest.fixture
def wrapped_git(tmp_path_factory, monkeypatch):
    """Have the shell lines given run before git."""

    def wrap(lines):
        folder = tmp_path_factory.mktemp("bin")
        (folder / "git").write_text(f'#!/bin/sh\n{lines}\nexec {shutil.which("git")} "$@"\n')
        (folder / "git").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    return wrap


@pytest.mark.parametrize("before", ["", "unset GIT_CONFIG_COUNT"], ids=["this git", "git before 2.31"])
def test_git_executes_nothing_that_the_repository_configures(hostile, repository, wrapped_git, before):
    for words in (["diff", "HEAD"], ["-c", "diff.external=", "diff", "--no-ext-diff", "HEAD"]):
        subprocess.run(["git", "-C", repository, *words], check=False, capture_output=True, timeout=20)
    trapped = executed(hostile)
    assert {"core.fsmonitor", "diff.evil.command", "filter.evil.clean", "diff.evil.textconv"} <= set(trapped)
    wrapped_git(before)
    found = manifest([], repository)["git"]
    assert executed(hostile) == []
    assert "+lr = 2" in found["diff"]


@pytest.mark.parametrize("ends", ["exit 128", "exec sleep 60"])
def test_without_a_list_of_the_filters_the_diff_is_left_out(hostile, repository, wrapped_git, monkeypatch, ends):
    monkeypatch.setattr(source_folder, "TIMEOUT_S", 2.0)
    wrapped_git(f'case " $* " in *" config "*) {ends};; esac')
    found = manifest([], repository)["git"]
    assert executed(hostile) == []
    assert (found["diff"], found["diff_left_out"]) == ("", True)


@pytest.mark.parametrize(("name", "left_out"), [(b"with=sign", True), (b"with.dot", False), (b"\xff", False)])
def test_a_filter_of_any_name_is_not_executed(hostile, repository, name, left_out):
    (repository / ".gitattributes").write_bytes(b"*.py filter=" + name)
    key, program = b"filter." + name + b".clean", repository / "filter.evil.clean.sh"
    subprocess.run(["git", "-C", repository, "config", key, program], check=True)
    subprocess.run(["git", "-C", repository, "diff", "--no-ext-diff", "HEAD"], check=False, capture_output=True)
    assert "filter.evil.clean" in executed(hostile)
    found = manifest([], repository)["git"]
    assert executed(hostile) == []
    assert (found["diff_left_out"], "+lr = 2" in found["diff"]) == (left_out, not left_out)


def test_a_partial_clone_fetches_nothing(hostile, repository):
    objects = (repository / ".git" / "objects").glob("??/*")
    (blob,) = [path for path in objects if b"lr = 1" in zlib.decompress(path.read_bytes())]
    blob.unlink()
    subprocess.run(["git", "-C", repository, "config", "extensions.partialClone", "origin"], check=True)
    subprocess.run(
        ["git", "-C", repository, "diff", "--no-ext-diff", "HEAD"], check=False, capture_output=True, timeout=20
    )
    assert "transport" in executed(hostile)
    assert manifest([], repository)["git"]["diff"] == ""
    assert executed(hostile) == []


def test_a_folder_without_a_repository(tmp_path):
    assert manifest([], tmp_path)["git"] is None


def test_the_environment_is_not_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2-hunter2")
    assert "hunter2" not in str(manifest([], tmp_path))


def test_a_user_without_an_entry_is_a_number(tmp_path, monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert manifest([], tmp_path)["user"] == "4000000"


VARIED = {"optimizer.lr": "0.1", "name": 'a "varied": {'}


def manifest_of(tmp_path, **fields):
    directory = RunDirectory.at(tmp_path)
    record = {"command": "python", "folder": "/", "varied": VARIED, "git": {"diff": ""}}
    write_json(directory.manifest, record | fields)
    return directory


def test_what_varies_is_read_without_the_diff(tmp_path, monkeypatch):
    directory = manifest_of(tmp_path, git={"diff": "+lr = 2\n" * HEAD_BYTES})
    monkeypatch.delattr(manifest_module, "read_json_or_empty")
    assert read_varied(directory) == VARIED


@pytest.mark.parametrize(
    "command", ["x" * HEAD_BYTES, "x" * (HEAD_BYTES - 80), "\u00e9" * HEAD_BYTES, '\n  "varied": {"a": 1}']
)
def test_what_varies_is_found_after_any_command(tmp_path, command):
    assert read_varied(manifest_of(tmp_path, command=command)) == VARIED


@pytest.mark.parametrize("text", ["", "{", '{\n  "varied": {', '{\n  "varied": 7}', '{"varied": {"a": 1}', "[" * 10**5])
def test_a_damaged_manifest_varies_nothing(tmp_path, text):
    directory = RunDirectory.at(tmp_path)
    directory.manifest.write_text(text)
    assert read_varied(directory) == {}


def test_values_as_they_are_typed():
    texts = [value_text(value) for value in (0.001, 1e-05, True, None, "a b", [0.9, 0.99], {"a": 1})]
    assert texts == ["0.001", "1e-05", "true", "null", "a b", "[0.9,0.99]", '{"a":1}']
    numbers = [as_typed(1.1, "1.10"), as_typed(1, "+1"), as_typed(True, "True")]
    assert [value_text(number) for number in numbers] == ["1.10", "+1", "true"]
    assert (numbers, json.dumps(numbers)) == ([1.1, 1, True], "[1.1, 1, true]")
