import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.stored import load, to_yaml
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return Composer()


def test_open_groups_hand_them_to_the_class(composer, tmp_path):
    words = ["+optimizer.amsgrad=true", "+task.mine=1", "model=convnet", "+model.mine={a: [1, 2]}"]
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
