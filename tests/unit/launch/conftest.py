"""A composer for a file of tests, and a folder to type in."""

from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path
