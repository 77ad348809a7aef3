from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from hpctrain.errors import RendezvousError
from hpctrain.run import secret as secret_module
from hpctrain.run.secret import discard_secret, read_secret, user_secret, write_secret


@pytest.fixture(autouse=True)
def any_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_an_attempts_secret_is_its_own_and_its_users(tmp_path):
    for name in ("0001", "0002"):
        (tmp_path / name).mkdir()
        write_secret(tmp_path / name)
    first, second = (read_secret(tmp_path / name) for name in ("0001", "0002"))
    assert len(first) == 64
    assert first != second
    assert stat.S_IMODE((tmp_path / "0001" / "secret").stat().st_mode) == 0o600
    discard_secret(tmp_path / "0001")
    assert list((tmp_path / "0001").iterdir()) == []


def test_an_attempt_without_a_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(secret_module, "VISIBLE_S", 0.0)
    with pytest.raises(RendezvousError, match=r"secret, can't be read \(No such file or directory\)"):
        read_secret(tmp_path)


def test_the_users_secret_is_made_once(tmp_path):
    variables = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    first = user_secret(variables)
    assert (len(first), user_secret(variables)) == (64, first)
    folder = tmp_path / "config" / "hpctrain"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "secret")] == [0o700, 0o600]
    assert [path.name for path in folder.iterdir()] == ["secret"]


def test_a_variable_comes_first():
    mine = "0123456789abcdef"
    assert user_secret({"HPCTRAIN_SECRET": mine, "XDG_CONFIG_HOME": "/nonexistent"}) == mine.encode()


@pytest.mark.parametrize("text", ["", "mine", "0123456789abcde\n"])
@pytest.mark.parametrize("place", ["HPCTRAIN_SECRET", "XDG_CONFIG_HOME"])
def test_a_users_secret_that_can_be_guessed_is_refused(tmp_path, place, text):
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    user_secret(variables)
    if place == "HPCTRAIN_SECRET":
        variables[place] = text
    else:
        (tmp_path / "hpctrain" / "secret").write_text(text)
    found = f"has {len(text.strip())} characters, expected 16 or more"
    with pytest.raises(RendezvousError, match=f"{found}, .*openssl rand -hex 32"):
        user_secret(variables)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_users_secret_that_belongs_to_another_is_refused(tmp_path):
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    user_secret(variables)
    os.chown(tmp_path / "hpctrain" / "secret", 65_534, -1)
    with pytest.raises(RendezvousError, match=r"secret belongs to the user 65534, expected 0; remove it, or set HPC"):
        user_secret(variables)


def test_a_users_secret_that_others_can_read_is_refused(tmp_path):
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    user_secret(variables)
    (tmp_path / "hpctrain" / "secret").chmod(0o640)
    with pytest.raises(RendezvousError, match=r"secret has the permissions 640, expected 600; remove it, or set HPC"):
        user_secret(variables)


def test_a_user_without_a_home(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RendezvousError, match="set HPCTRAIN_SECRET to the same value on all ranks"):
        user_secret({"XDG_CONFIG_HOME": str(tmp_path / "file")})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_read_it():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        write_secret(Path(folder))
        done = subprocess.run(["cat", f"{folder}/secret"], user=65_534, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Permission denied" in done.stderr
