"""What the tests of several rooms begin with."""

from __future__ import annotations

import pytest

from hpctrain.run.directory import RunDirectory


@pytest.fixture
def directory(tmp_path):
    """A run directory that is new."""
    directory = RunDirectory.at(tmp_path / "run")
    directory.create(0o750)
    return directory
