from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.target import (
    PASSED_TASK,
    find_own,
    own_targets,
    path_of,
    require_maker,
    require_own_targets,
    target_bound,
)
from hpctrain.errors import ConfigError


class Own:
    pass


@pytest.fixture
def program(monkeypatch):
    """A program with the class `Own`."""
    module = ModuleType("__main__")
    module.Own = Own
    monkeypatch.setitem(sys.modules, "__main__", module)


@pytest.fixture(scope="module")
def config():
    return Composer().compose(["callbacks=[early_stopping]"])


def test_classes_of_the_program_are_found_wherever_the_configuration_names_them(program, config):
    found = replace(
        config,
        task={"_target_": "__main__.Own", "inner": [{"_target_": "__main__.Own"}]},
        callbacks={"mine": {"_target_": "__main__.Absent"}},
    )
    assert own_targets(config) == {}
    assert own_targets(found) == {
        "task._target_": "__main__.Own",
        "task.inner.0._target_": "__main__.Own",
        "callbacks.mine._target_": "__main__.Absent",
    }
    with pytest.raises(
        ConfigError, match=r"callbacks\.mine\._target_=__main__\.Absent: only the program or notebook that"
    ):
        require_own_targets(found)


def test_a_path_means_what_was_given_for_it_inside_the_context_alone(program):
    made = partial(Own)
    assert find_own("__main__.Own") is Own
    with target_bound("__main__.Own", made):
        assert find_own("__main__.Own") is made
        with target_bound("__main__.Own", None):
            assert find_own("__main__.Own") is Own
    assert find_own("__main__.Own") is Own
    assert find_own("some.module.Own") is find_own(PASSED_TASK) is None


def test_the_path_of_what_has_no_name_of_its_own():
    def inner():
        pass

    assert path_of(Own) == f"{__name__}.Own"
    assert {path_of(maker) for maker in (inner, lambda: None, partial(Own))} == {PASSED_TASK}


@pytest.mark.parametrize("task", [3, Own()])
def test_a_task_that_exists_already_is_refused(task):
    with pytest.raises(ConfigError, match="each attempt makes its own"):
        require_maker(task)
