"""Fixtures that the tests of several rooms use."""

from __future__ import annotations

import contextlib
import resource

import pytest

from hpctrain.run.directory import RunDirectory
from tests.unit.fakes import Clock, FakeSlurm


@pytest.fixture
def directory(tmp_path):
    """A new run directory."""
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    return directory


@pytest.fixture
def clock():
    """A clock that a test sets."""
    return Clock()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """SLURM's commands without a cluster; the PATH has them too."""
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    yield fake
    assert fake.unplanned == []


@pytest.fixture
def no_slurm(tmp_path, monkeypatch):
    """A machine without SLURM's commands."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@pytest.fixture
def file_size_limit():
    """A context in which no file can grow beyond some bytes, as on a full disk."""

    @contextlib.contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
