from __future__ import annotations

import re

import pytest

from hpctrain.errors import ConfigError
from hpctrain.launch.existing_run import changed_config
from hpctrain.launch.prepare import prepare

COMMAND = ["python", "-m", "hpctrain"]


def test_a_resume_takes_values_and_groups(composer, folder):
    directory = prepare(composer.compose(["run_dir=R", "optimizer.lr=0.5", "trainer.max_epochs=7"]), COMMAND).directory
    config = changed_config(directory, ["trainer.max_steps=5", "cluster=slurm", "nodes=2", "cluster.partition=p"], None)
    assert (config.optimizer["lr"], config.trainer.max_steps, config.trainer.max_epochs) == (0.5, 5, 7)
    assert (config.cluster.kind, config.cluster.partition, config.nodes) == ("slurm", "p", 2)


def test_a_resume_takes_the_groups_whose_keys_belong_to_a_class(composer, folder):
    directory = prepare(composer.compose(["run_dir=R", "optimizer.lr=0.5", "seed=3"]), COMMAND).directory
    config = changed_config(directory, ["optimizer=sgd", "optimizer.lr=0.2"], None)
    assert (config.optimizer["_target_"], config.optimizer["lr"], config.seed) == ("torch.optim.SGD", 0.2, 3)
    config = changed_config(directory, ["task=text", "model=gpt", "model.num_layers=3"], None)
    assert (config.task["_target_"], config.model["num_layers"]) == ("hpctrain.tasks.text.Text", 3)
    assert config.optimizer["lr"] == 0.5
    with pytest.raises(ConfigError, match="optimizer=sg: is not an option"):
        changed_config(directory, ["optimizer=sg"], None)


def test_a_resume_with_an_unknown_key(composer, folder):
    directory = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    with pytest.raises(ConfigError, match=r"trainer\.max_step=5: is not a known key"):
        changed_config(directory, ["trainer.max_step=5"], None)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("trainer.max_step=5", "trainer.max_step=5: is not a known key; did you mean trainer.max_steps?"),
        ("seeed=5", "did you mean seed?"),
        ("seed=1,2", "seed=1,2: has several values; write seed="),
        ("name=a,b", "has several values; write name="),
        ("trainer.max_steps=[1", "cannot be parsed as KEY=VALUE"),
        ("optimizer.lr=choice(null)", "has null in a function, which takes none; list the values: optimizer.lr=null,1"),
        ("~seed", "~seed=null: is required"),
        ("cluster.kind=slurm", "is set by the option"),
    ],
)
def test_a_resume_explains_mistakes_as_a_training_does(composer, folder, override, error):
    directory = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    with pytest.raises(ConfigError, match=re.escape(error)):
        changed_config(directory, [override], None)


def test_a_resume_adds_and_removes_keys_of_a_class(composer, folder):
    directory = prepare(composer.compose(["run_dir=R"]), COMMAND).directory
    config = changed_config(directory, ["+optimizer.amsgrad=true", "~optimizer.eps", "cluster.env.A=1"], None)
    assert config.optimizer["amsgrad"] is True
    assert "eps" not in config.optimizer
    assert config.cluster.env == {"A": "1"}
