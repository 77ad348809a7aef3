from __future__ import annotations

import re

import pytest

from hpctrain.config.checks import warnings_of
from hpctrain.config.compose import Composer
from hpctrain.config.root import Config
from hpctrain.config.task_checks import metric_mode, unknown_hook_error
from hpctrain.errors import ConfigError

PLAIN = """\
from hpctrain.tasks import Task


class Plain(Task):
    def train_dataset(self): ...

    def loss(self, model, batch): ...


class Own(Plain):
    {}
"""


def composed(tmp_path, monkeypatch, source: str) -> Config:
    (tmp_path / "own_tasks.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    return Composer().compose(["task=custom", "task._target_=own_tasks.Own"])


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (
            "def loss(self, model, batch, index): ...",
            r"its loss can't be called: .*write def loss\(self, model, batch\)",
        ),
        ("def derive(self): ...", r"its derive can't be called: it takes self; write def derive\(self, means\)"),
        ("loss = None", r"has no method loss; define loss\(self, model, batch\)"),
        ("train_dataset = None", r"has no method train_dataset; define train_dataset\(self\)"),
    ],
)
def test_a_missing_method_and_one_that_cannot_be_called_are_refused(tmp_path, monkeypatch, method, problem):
    with pytest.raises(ConfigError, match=problem) as found:
        composed(tmp_path, monkeypatch, PLAIN.format(method))
    assert found.value.key == "task._target_"


@pytest.mark.parametrize(
    "method",
    [
        "def d_loss(self, model, batch): ...",
        "def losses(self): ...",
        "def test_dataset(self): ...",
        "def _evalute(self): ...",
        "def prepared(self): ...\n    def eval_dataset(self): return self.prepared()",
        "def setup(self): ...\n    def prepare(self): self.setup()",
        "def loss(self, *arguments): ...",
        "def loss(self, model, batch, weight=1): ...",
        "@staticmethod\n    def loss(model, batch): ...",
        "loss = Plain.loss",
    ],
)
def test_methods_of_ones_own_are_accepted(tmp_path, monkeypatch, method):
    assert warnings_of(composed(tmp_path, monkeypatch, PLAIN.format(method))) == []


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("def validation_step(self, batch, index): ...", "has validation_step, .*define evaluate"),
        ("def configure_optimizers(self): ...", "has configure_optimizers, .*choose optimizer=NAME"),
        ("def on_train_epoch_end(self): ...", "has on_train_epoch_end, .*write a callback"),
        ("def eval_datset(self): ...", "has eval_datset, .*did you mean eval_dataset?"),
        ("def evalute(self, model, batch): ...", "has evalute, .*did you mean evaluate?"),
    ],
)
def test_a_method_that_only_other_code_can_call_is_warned_of(tmp_path, monkeypatch, method, problem):
    (warning,) = warnings_of(composed(tmp_path, monkeypatch, PLAIN.format(method)))
    assert re.search(problem, warning)


def test_a_class_of_another_kind_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"is not a subclass of hpctrain\.tasks\.Task"):
        composed(tmp_path, monkeypatch, "class Own:\n    def loss(self, model, batch): ...")


@pytest.mark.parametrize("method", ["load_state", "get_state_dict", "save_state", "load_dict", "stop", "_on_epoch"])
def test_methods_of_a_callbacks_own_are_accepted(method):
    assert unknown_hook_error("callbacks.own", "own.Own", method) is None


@pytest.mark.parametrize("method", ["aftr_step", "on_epoch_end", "load_state_dic", "state_dct", "before_epoch"])
def test_what_is_almost_a_hook_is_refused(method):
    assert f"has {method}, which is not a hook" in str(unknown_hook_error("callbacks.own", "own.Own", method))


METRICS = """\
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
    (tmp_path / "own_tasks.py").write_text(METRICS)
    monkeypatch.chdir(tmp_path)
    assert metric_mode(Composer().compose(words)) == mode
