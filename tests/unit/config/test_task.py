from __future__ import annotations

from importlib import import_module

import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.task import EXTRAS
from hpctrain.errors import ConfigError

CLASSES = {
    "hpctrain.tasks.keras_digits": ["KerasDigits"],
}


@pytest.mark.parametrize("module", EXTRAS)
def test_a_task_without_its_package_names_the_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra = EXTRAS[module]
    name, *arguments = CLASSES[module]
    words = ["task=custom", f"task._target_={module}.{name}", *arguments]
    Composer().compose(words)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else name)
    with pytest.raises(ConfigError, match=rf'package {package}, .*; pip install "hpctrain\[{extra}\]"'):
        Composer().compose(words)


@pytest.mark.parametrize("module", EXTRAS)
def test_a_module_that_needs_an_extra_is_there(module: str) -> None:
    assert import_module(module).__name__ == module
