from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from hpctrain.config.compose import Composer
from hpctrain.config.precision import FORMATS
from hpctrain.errors import ConfigError, TaskError
from hpctrain.tasks.digits import Digits
from hpctrain.train.build import build_model, build_network, build_task, instantiate, locate

OWN = """
from torch import nn

class Outer:
    class Inner(nn.Linear):
        pass

class Takes:
    def __init__(self, *arguments, **options):
        self.arguments, self.options = arguments, options

def fails(**options):
    raise LookupError("the user's own")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's package `own_code`, with modules that can't be imported in it."""
    folder = tmp_path / "own_code"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "parts.py").write_text(OWN)
    (folder / "needs.py").write_text("import own_code.absent")
    (folder / "lacks.py").write_text("import no_such_module_anywhere")
    (folder / "breaks.py").write_text("raise ZeroDivisionError('while importing')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_code"]:
        del sys.modules[name]


def test_a_target_is_a_class_in_a_module_or_in_a_class(own):
    assert locate("model", "torch.nn.Linear") is nn.Linear
    assert locate("model", "own_code.parts.Outer.Inner").__name__ == "Inner"


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("own_code.parts.Outter", "own_code.parts has no Outter"),
        ("own_code.part.Outer", "own_code has no part"),
        ("no_such_module_anywhere.Class", "no module named no_such_module_anywhere"),
        ("torch.nn.Linear.Inside", "no Inside"),
    ],
)
def test_a_target_that_is_not_there_names_key_and_value(own, target, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        locate("task", target)
    assert str(caught.value).startswith(f"task._target_={target}: ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("module", "error"),
    [("needs", ModuleNotFoundError), ("lacks", ModuleNotFoundError), ("breaks", ZeroDivisionError)],
)
def test_what_a_users_module_raises_passes_through(own, module, error):
    with pytest.raises(error) as caught:
        locate("task", f"own_code.{module}.Class")
    assert caught.traceback[-1].path.name == f"{module}.py"


def test_what_a_users_class_raises_passes_through(own):
    with pytest.raises(LookupError, match="the user's own"):
        instantiate("model", {"_target_": "own_code.parts.fails", "a": 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'widht'"):
        instantiate("model", {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1, "widht": 1})


def test_nodes_inside_are_built_first_and_plain_ones_handed_over(own):
    node = {
        "_target_": "own_code.parts.Takes",
        "inside": {"_target_": "own_code.parts.Takes", "depth": 2},
        "plain": {"a": [1, 2]},
        "nothing": None,
    }
    made = instantiate("task", node, "first")
    assert made.arguments == ("first",)
    assert made.options["inside"].options == {"depth": 2}
    assert made.options["plain"] == {"a": [1, 2]}
    assert made.options["nothing"] is None


def test_a_mistake_inside_of_a_node_names_its_key(own):
    with pytest.raises(ConfigError, match=r"^task\.inside\._target_=own_code\.parts\.Absent: "):
        instantiate("task", {"_target_": "own_code.parts.Takes", "inside": {"_target_": "own_code.parts.Absent"}})


def test_a_task_must_be_one():
    with pytest.raises(TaskError, match=r"task\._target_=torch\.nn\.ReLU made a ReLU: derive it from hpctrain\.tasks"):
        build_task({"_target_": "torch.nn.ReLU"})
    assert isinstance(build_task({"_target_": "hpctrain.tasks.digits.Digits", "held_out": 0.5}), Digits)


def test_a_configured_model_comes_before_the_tasks_own():
    configured = build_model({"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}, Digits())
    assert (configured.in_features, configured.out_features) == (2, 3)
    assert type(build_model({"_target_": None}, Digits())).__name__ == "ConvNet"


def test_a_model_must_be_a_module():
    with pytest.raises(TaskError, match=r"must be a torch\.nn\.Module, but is a dict"):
        build_model({"_target_": "builtins.dict"}, Digits())


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize("precision", [formats.kind for formats in FORMATS.values() if formats.copy])
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["trainer.channels_last=true"],
        ["trainer.activation_checkpointing=['features.*']"],
        ["trainer.channels_last=true", "trainer.activation_checkpointing=['features.0']"],
    ],
    ids=" ".join,
)
def test_a_copy_computes_with_what_was_trained_however_it_is_dressed(composer, lone_world, precision, words):
    torch.manual_seed(0)
    config = composer.compose(["model=convnet", "model.width=4", f"precision={precision}", *words])
    network = build_network(config, None, lone_world)
    optimizer = torch.optim.SGD(network.module.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in network.module.named_parameters()}
    for _ in range(2):
        network.model(torch.randn(4, 1, 8, 8)).square().mean().backward()
        network.master.collect_gradients()
        optimizer.step()
        with torch.no_grad():
            network.master.publish()
        trained, copied = dict(network.module.named_parameters()), dict(network.model.named_parameters())
        assert trained.keys() == copied.keys()
        for name, value in trained.items():
            assert torch.equal(copied[name], value.to(copied[name].dtype)), name
            assert copied[name].stride() == value.stride(), name
            assert not torch.equal(value, before[name]), name


def test_a_parameter_without_a_shape_is_named_with_the_remedy():
    class Lazy(Digits):
        def build_model(self):
            return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())

    with pytest.raises(
        TaskError, match=r"0\.weight, 0\.bias, 1\.weight, 1\.bias and 2 more have no shape before the fir"
    ):
        build_model({"_target_": None}, Lazy())
