from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from enum import IntEnum
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.version import getbase

import hpctrain
from hpctrain.api.composition import as_words
from hpctrain.config.cluster import Slurm
from hpctrain.config.hydra_application import VERSION_BASE
from hpctrain.errors import ConfigError


class Float(float):
    """A float as NumPy's, which is a subclass of Python's."""

    def __repr__(self):
        return f"np.float64({float(self)})"


class Scalar:
    """A number as those of NumPy that are no subclass."""

    shape = ()

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


class Level(IntEnum):
    HIGH = 2


def test_words_are_those_of_the_command_line():
    config = hpctrain.compose(["cluster=slurm", "nodes=4", "cluster.partition=low,high"])
    assert isinstance(config.cluster, Slurm)
    assert (config.nodes, config.cluster.partition, config.name) == (4, "low,high", "digits")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (1e-05, "1e-05"),
        (Path("a b"), "'a b'"),
        ("it's", r"'it\'s'"),
        ([1, "a,b", [None]], "[1,'a,b',[null]]"),
        ({"a": (1, 2)}, "{a:[1,2]}"),
        ({"a-b": 1, "head.*": 2, "_c/d": 3}, "{a-b:1,head.*:2,_c/d:3}"),
        (Float(1e-05), "1e-05"),
        (Level.HIGH, "2"),
        (Scalar(7), "7"),
        ([Scalar(True), Scalar(0.5)], "[true,0.5]"),
    ],
)
def test_values_become_words(value, word):
    assert as_words({"key": value}) == [f"key={word}"]


def test_values_mean_themselves():
    texts = ["a,b", "it's", 'say "so"', "a\\", "key=value", "1e3", "null", "[x]", "${nodes}x", " ü "]
    given = {"cluster": "slurm", "optimizer.lr": 1e-05, "optimizer.betas": (0.8, 0.9), "task.held_out": 0.5}
    config = hpctrain.compose(given | {f"cluster.env.V{number}": text for number, text in enumerate(texts)})
    assert (config.optimizer["lr"], config.optimizer["betas"], config.task["held_out"]) == (1e-05, [0.8, 0.9], 0.5)
    assert list(hpctrain.compose({"callbacks": ["early_stopping"]}).callbacks) == ["early_stopping"]
    wanted = [text.replace("${nodes}", "1") for text in texts]
    assert [config.cluster.env[f"V{number}"] for number in range(len(texts))] == wanted


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("nodes=4", r"overrides=nodes=4: is a string, expected a list of strings; write \['nodes=4'\]"),
        ({"nodes": {1, 2}}, "nodes={1, 2}: is a set, which a configuration can't hold"),
        (["nodes=1,2"], "nodes=1,2: has several values"),
        ({"task.x": {"c:d": 2}}, "task.x={...}: has the key 'c:d', which isn't a plain word; use letters"),
        ({"task.x": [{"null": 1}]}, "task.x={...}: has the key 'null'"),
        ({"task.x": {1: 1}}, "task.x={...}: has the key 1,"),
        ({"optimizer.lrr": 1}, "did you mean optimizer.lr"),
        ({"trainer": {"max_steps": 3, "profile": None}}, "set its keys one by one: trainer.max_steps, trainer.profile"),
        ({"optimizer": {}}, "choose one of adamw, "),
        (Float, "overrides=Float: is a class, expected a list or a mapping; write task=Float"),
        (["-m", "seed=1,2"], "overrides=-m: is a flag of the command line, .*; call hpctrain.submit for each value"),
        (["--config-dir=x"], r"overrides=--config-dir=x: is a flag .*; write compose\(..., config_dir=FOLDER\)"),
        (["--cfg", "job"], "overrides=--cfg: is a flag .*; leave it out"),
    ],
)
def test_a_mistake_is_one_line(overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        hpctrain.compose(overrides)


def test_folders_with_options_are_those_of_the_command(tmp_path, monkeypatch):
    for folder, seed in (("conf", 3), ("named", 4)):
        (tmp_path / folder / "experiment").mkdir(parents=True)
        text = f"# @package _global_\nseed: {seed}\n"
        (tmp_path / folder / "experiment" / f"{folder}_one.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert hpctrain.compose(["experiment=conf_one"]).seed == 3
    assert hpctrain.compose({"experiment": "named_one"}, config_dir=tmp_path / "named").seed == 4


def test_a_program_that_uses_hydra_keeps_it(tmp_path):
    (tmp_path / "theirs.yaml").write_text("answer: 42\n")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        before, base, name = GlobalHydra.instance().hydra, getbase(), JobRuntime.instance().get("name")
        hpctrain.compose(["nodes=1"])
        with pytest.raises(ConfigError):
            hpctrain.compose(["no_key=1"])
        assert GlobalHydra.instance().hydra is before
        assert getbase() == base
        assert JobRuntime.instance().get("name") == name == "app"
        assert hydra_compose("theirs").answer == 42


def test_a_program_and_hpctrain_may_use_the_same_names_in_hydras_store(tmp_path, monkeypatch):
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", {**store.repo, "optimizer": {}, "task": {}})
    store.store(group="optimizer", name="adamw", node={"momentum": 3})
    store.store(group="task", name="digits", node={"answer": 42})
    store.store(name="train", node={"answer": 42})
    before = deepcopy(store.repo)
    assert hpctrain.compose(["optimizer=adamw", "optimizer.lr=0.5"]).optimizer["lr"] == 0.5
    assert store.repo == before
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        assert hydra_compose("train", ["+optimizer=adamw"]) == {"answer": 42, "optimizer": {"momentum": 3}}


@pytest.mark.nightly
def test_threads_may_compose_at_the_same_time():
    with ThreadPoolExecutor(4) as pool:
        configs = list(pool.map(lambda seed: hpctrain.compose({"seed": seed}), range(8)))
    assert [config.seed for config in configs] == list(range(8))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            Float,
            r"config=Float: expected a configuration, got a class; .*fit\(hpctrain\.compose\(task=Float\)\)",
        ),
        (
            {"nodes": 1},
            r"config={'nodes': 1}: .* got an object of type dict; .*fit\(hpctrain\.compose\({\.\.\.}\)\)",
        ),
        (["nodes=1"], r"got an object of type list; .*fit\(hpctrain\.compose\(\[\.\.\.\]\)\)"),
        (
            3,
            r"config=3: expected a configuration, got an object of type int; .*fit\(hpctrain\.compose\(\.\.\.\)\)",
        ),
    ],
)
def test_training_needs_a_configuration(given, problem):
    with pytest.raises(ConfigError, match=problem):
        hpctrain.fit(given)
    with pytest.raises(ConfigError, match=problem.replace("fit", "submit")):
        hpctrain.submit(given)
