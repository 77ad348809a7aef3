"""A sweep of three runs."""

from __future__ import annotations

import logging

import pytest
import torch

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


@pytest.fixture
def as_before(monkeypatch, tmp_path):
    """Runs in this process leave logging and threads as they were."""
    monkeypatch.chdir(tmp_path)
    logger, threads = logging.getLogger("hpctrain"), torch.get_num_threads()
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    torch.set_num_threads(threads)
