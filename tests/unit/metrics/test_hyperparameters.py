from __future__ import annotations

import json

import pytest

from hpctrain.metrics.tensorboard import hyperparameters, parse_value
from hpctrain.run.directory import RunDirectory


@pytest.fixture
def run_of(tmp_path):
    def build(**fields):
        directory = RunDirectory(tmp_path)
        directory.manifest.write_text(json.dumps(fields, indent=2))
        return directory

    return build


def test_those_that_a_sweep_varied(run_of):
    run = run_of(
        command="hpctrain -m seed=1,2 nodes=1,2", varied={"optimizer.lr": "1e-3", "nodes": "2", "task": "text"}
    )
    assert hyperparameters(run) == {"optimizer.lr": 0.001, "task": "text"}


def test_without_a_sweep_those_that_were_typed(run_of):
    command = (
        "python -m hpctrain task=digits '+task.names=[a, b]' cluster.nodes=3 run_dir=x trainer.compile=true --wait"
    )
    run = run_of(command=command, varied={})
    assert hyperparameters(run) == {"task": "digits", "task.names": "[a, b]", "trainer.compile": True}


def test_without_a_manifest_or_with_an_odd_one_none(run_of, tmp_path):
    assert hyperparameters(RunDirectory(tmp_path)) == {}
    assert hyperparameters(run_of(command="it's", varied={})) == {}


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("3", 3),
        ("1e-3", 0.001),
        ("1.", 1.0),
        ("true", True),
        ("null", "null"),
        ("a=b", "a=b"),
        ('{"a": 1}', '{"a": 1}'),
    ],
)
def test_values(typed, value):
    assert parse_value(typed) == value
    assert type(parse_value(typed)) is type(value)
