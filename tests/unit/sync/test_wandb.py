"""What W&B's client is given; the client itself, of which the gate has none, is replaced."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from hpctrain.sync.sent_run import Row, describe
from hpctrain.sync.wandb import WandbOnline


class ResumedRun:
    """A run whose last row at W&B is that of step 20."""

    step = 0  # as in wandb 0.31
    starting_step = 21
    url = "https://wandb.ai/me/digits/runs/abc"

    def __init__(self):
        self.logged = []

    def log(self, values, step):
        del values
        self.logged.append(step)


@pytest.fixture
def wandb(monkeypatch):
    """A package `wandb` of this test, which resumes this run."""
    package = ModuleType("wandb")
    package.run = ResumedRun()
    package.asked = []
    package.Settings = SimpleNamespace
    package.init = lambda **asked: (package.asked.append(asked), package.run)[1]
    monkeypatch.setitem(sys.modules, "wandb", package)
    for name in ("WANDB_BASE_URL", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    return package


def test_a_row_that_wandb_has_is_never_handed_to_its_client(wandb, directory):
    service = WandbOnline()
    opened = service.open(describe(directory, "abc"), "")
    assert (opened.run_id, opened.last_step) == ("abc", 20)
    assert [asked["id"] for asked in wandb.asked] == ["abc"]
    service.send([Row(step, 5.0, {"train/loss": 1.0}) for step in range(18, 24)], in_doubt=True)
    assert wandb.run.logged == [21, 22, 23]
    service.abandon()


def test_a_destination_is_the_server_the_entity_and_the_project(wandb, directory, monkeypatch):
    del wandb
    service = WandbOnline()
    assert service.destination(describe(directory, "abc")) == "hpctrain"
    directory.config.write_text('{"logger": {"wandb": {"project": "digits", "entity": "lab"}}}')
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:s3cret@host/")
    assert service.destination(describe(directory, "abc")) == "https://host/lab/digits"
