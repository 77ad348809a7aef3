"""A run's config.yaml, and keys that the schema doesn't have."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from hpctrain.config.checks import check
from hpctrain.config.compose import Composer
from hpctrain.config.stored import load, load_for_model, to_yaml
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return Composer()


def test_open_groups_hand_them_to_the_class(composer, tmp_path):
    # classes whose source doesn't show their arguments
    targets = ["task._target_=torch.nn.Identity", "model=convnet", "model._target_=torch.nn.Identity"]
    words = [*targets, "+optimizer.amsgrad=true", "+task.mine=1", "+model.mine={a: [1, 2]}"]
    config = composer.compose(words)
    assert (config.optimizer["amsgrad"], config.task["mine"], config.model["mine"]) == (True, 1, {"a": [1, 2]})
    assert config.optimizer["lr"] == composer.compose([]).optimizer["lr"]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "config.yaml") == config


def test_the_schemas_checks_stand(composer):
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        composer.compose(["+optimizer.amsgrad=true", "optimizer.lr=-1"])


@pytest.mark.parametrize("word", ["+trainer.mine=1", "+cluster.mine=1", "+data.mine=1", "+schedule.mine=1"])
def test_every_other_group_refuses_them(composer, word):
    with pytest.raises(ConfigError, match="is not a known key") as caught:
        composer.compose([word])
    assert str(caught.value).startswith(word[1:])


def test_a_group_inside_of_a_group_refuses_them(composer):
    with pytest.raises(ConfigError, match=r"^cluster\.requeue\.mine=1: is not a known key"):
        composer.compose(["cluster=slurm", "+cluster.requeue.mine=1"])


def test_overrides_are_applied_to_what_was_stored(composer, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(composer.compose(["cluster=slurm", "nodes=2"])))
    config = load(path, ["trainer.max_steps=7", "cluster.partition=gpu"])
    assert (config.nodes, config.trainer.max_steps, config.cluster.partition) == (2, 7, "gpu")
    with pytest.raises(ConfigError, match=r"^trainer\.max_steps=many: must be a whole number"):
        load(path, ["trainer.max_steps=many"])


def test_a_key_that_this_version_does_not_know_is_refused(composer, tmp_path):
    path = tmp_path / "config.yaml"
    written = to_yaml(composer.compose(["task=digits"]))
    expected = (
        r"={}: is in .*config\.yaml, but is not a key of this version .*manifest\.json names it.*remove the key there"
    )
    path.write_text(written + "later: 1\n")
    with pytest.raises(ConfigError, match="^later" + expected.format(1)):
        load(path)
    path.write_text(written.replace("  sync_timeout_s: ", "  sync_wait_s: "))
    with pytest.raises(ConfigError, match=r"^logger\.sync_wait_s" + expected.format(r"10\.0")):
        load(path, ["trainer.max_steps=7"])
    # what builds the model doesn't depend on it
    assert load_for_model(path).task == composer.compose(["task=digits"]).task


def test_a_shipped_callback_of_another_version_is_checked(composer):
    node = {"_target_": "hpctrain.callbacks.average_weights.AverageWeights", "start": 0.5}
    with pytest.raises(ConfigError, match=r"^callbacks\.mine\.start=0\.5: .*has no argument start"):
        check(dataclasses.replace(composer.compose([]), callbacks={"mine": node}))


@pytest.mark.parametrize(
    ("held", "where", "what"),
    [
        (b"seed: 1\nnodes: [1\n", "line 3, is not valid YAML", "starts in line 2"),
        (b"seed: 1\nseed: 2\n", "line 2, is not valid YAML", "duplicate key seed"),
        (b"name: caf\xe9\n", "line 1, is not UTF-8", "save the file as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(held, where, what, tmp_path):
    (tmp_path / "config.yaml").write_bytes(held)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "config.yaml")
    text = str(caught.value)
    assert "\n" not in text
    assert where in text
    assert what in text
    assert str(tmp_path / "config.yaml") in text


def test_the_text_is_as_omegaconf_writes_it(composer):
    values = ["cluster.env.A='1e3'", "cluster.env.B='é\"'", "cluster.env.C='0750'", "cluster.setup=['a b','c: d']"]
    config = composer.compose(["cluster=slurm", *values, "name=no"])
    assert to_yaml(config) == OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
