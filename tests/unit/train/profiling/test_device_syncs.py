from __future__ import annotations

import importlib.util
import sys
import warnings
from collections import Counter

import pytest

from hpctrain.train.profiling.sampler import MODE_WARNING, SYNC_WARNING, counted_syncs, user_line


class Mode:
    """Stands in for torch.cuda, which warns on a GPU only."""

    def __init__(self) -> None:
        self.mode = 0

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        warnings.warn(f"{MODE_WARNING} feature and does not yet detect all", UserWarning, stacklevel=2)
        self.mode = mode


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A user's module whose third line calls something that warns as torch does."""
    path = tmp_path / "mine.py"
    path.write_text(f"import warnings\ndef loss():\n    warnings.warn('{SYNC_WARNING} (Triggered ...)')\n")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_call_is_counted_at_its_line(task):
    found, mode = Counter(), Mode()
    with counted_syncs(found, mode):
        task.loss()
        task.loss()
        assert mode.mode == "warn"
    assert found == {"mine.py:3": 2}
    assert mode.mode == 0


def test_a_file_outside_of_the_working_directory_has_its_whole_path(task, tmp_path, monkeypatch):
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    found = Counter()
    with counted_syncs(found, Mode()):
        task.loss()
    assert found == {f"{tmp_path}/mine.py:3": 1}


def test_other_warnings_pass_and_errors_reset_the_mode(task):
    mode = Mode()

    def fail():
        with counted_syncs(Counter(), mode):
            warnings.warn("something else", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="something else"):
        fail()
    mode.mode = 1
    with pytest.raises(LookupError), counted_syncs(Counter(), mode):
        raise LookupError
    assert mode.mode == 1


def test_waits_of_hpctrain_itself_are_not_a_users():
    code = compile("def inside(look):\n    return look()\n", "", "exec")

    def called_from(path):
        names = {}
        exec(code.replace(co_filename=path), names)
        for constant in code.co_consts:
            if hasattr(constant, "co_filename"):
                names["inside"].__code__ = constant.replace(co_filename=path)
        return names["inside"](lambda: user_line(sys._getframe(1)))

    package = __import__("hpctrain").__path__[0]
    assert called_from(f"{package}/train/step.py") is None
    assert called_from(f"{package}/metrics/meter.py") is None
    assert called_from(f"{package}/tasks/digits.py").endswith("hpctrain/tasks/digits.py:2")
    assert called_from("/home/me/task.py") == "/home/me/task.py:2"
    # torch's own Python between the user's line and the wait
    assert "test_device_syncs.py" in called_from(f"{__import__('torch').__path__[0]}/nn/functional.py")
