from __future__ import annotations

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.metric import metric_mode

OWN = """\
from hpctrain.tasks import Task


class Plain(Task):
    def loss(self, model, batch): ...
    def train_dataset(self): ...


class Set(Plain):
    metric = "f1"
    metric_mode = "max"


class Computed(Set):
    def __init__(self):
        self.metric_mode = "min"
"""


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["task=digits"], "max"),
        (["task=text"], "min"),
        (["task=digits", "checkpoint.metric=loss"], "min"),
        (["task=digits", "checkpoint.metric=f1"], None),
        (["task=digits", "checkpoint.metric=f1", "checkpoint.metric_mode=max"], "max"),
        (["task=custom", "task._target_=own_tasks.Plain"], "min"),
        (["task=custom", "task._target_=own_tasks.Set"], "max"),
        (["task=custom", "task._target_=own_tasks.Computed"], None),
    ],
)
def test_the_mode_of_a_metric_by_configuration_and_source(tmp_path, monkeypatch, words, mode):
    (tmp_path / "own_tasks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert metric_mode(Composer().compose(words)) == mode
