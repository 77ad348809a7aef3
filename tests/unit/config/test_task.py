from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from hpctrain.config.checks import warnings_of
from hpctrain.config.compose import Composer
from hpctrain.config.task import EXTRAS
from hpctrain.errors import ConfigError


@pytest.mark.parametrize("module", EXTRAS)
def test_a_task_without_its_package_names_the_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra = EXTRAS[module]
    words = ["task=custom", f"task._target_={module}.Class"]
    Composer().compose(words)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else name)
    with pytest.raises(ConfigError, match=rf'package {package}, .*; pip install "hpctrain\[{extra}\]"'):
        Composer().compose(words)


@pytest.mark.parametrize("module", EXTRAS)
def test_a_module_that_needs_an_extra_is_there(module: str) -> None:
    assert import_module(module).__name__ == module


def test_data_that_this_machine_does_not_have(tmp_path: Path) -> None:
    words = ["task=tokens", "model=gpt", "task.context_length=8", f"task.data={tmp_path / 'nowhere'}"]
    with pytest.raises(ConfigError, match=r"task\.data=\S+/nowhere: is not a folder"):
        Composer().compose(words)
    (warning,) = warnings_of(Composer().compose([*words, "cluster=slurm"]))
    assert "nowhere is not a folder on this machine: it must exist on the nodes" in warning
    assert warnings_of(Composer().compose([*words, f"task.data={tmp_path}", "cluster=slurm"])) == []
