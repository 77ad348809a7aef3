import pytest

from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError
from hpctrain.launch.prepare import plan
from hpctrain.sweep.sweep import by_resources, require_one_cluster


@pytest.fixture(scope="module")
def composer():
    return Composer()


def test_runs_that_ask_for_the_same_share_an_array(composer):
    runs = [
        plan(composer.compose(["cluster=slurm", f"nodes={nodes}", f"optimizer.lr={lr}"]))
        for nodes in (1, 2)
        for lr in (1e-3, 3e-4)
    ]
    assert by_resources(runs) == [[0, 1], [2, 3]]


def test_other_memory_is_another_array(composer):
    runs = [plan(composer.compose(["cluster=slurm", f"cluster.memory_gb={memory}"])) for memory in (1, 2, 1)]
    assert by_resources(runs) == [[0, 2], [1]]


def test_two_kinds_of_cluster_are_refused(composer):
    with pytest.raises(ConfigError, match="can't be swept over"):
        require_one_cluster([composer.compose([]), composer.compose(["cluster=slurm"])])
