"""A sweep of three runs."""

from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer
from hpctrain.launch.prepare import prepare


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def many(composer, tmp_path, monkeypatch):
    """A sweep of three runs, none of them started."""
    monkeypatch.chdir(tmp_path)
    return [prepare(composer.compose([f"run_dir=many/{n}", f"seed={n}"]), []).directory for n in range(3)]
