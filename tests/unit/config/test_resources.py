import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.resources import resources_of
from hpctrain.config.visible_gpus import installed_build
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize(
    ("words", "processes", "world_size"),
    [
        (["nodes=3"], 1, 3),
        (["nodes=3", "cluster.processes_per_node=2"], 2, 6),
        (["nodes=2", "cluster.gpus_per_node=4"], 4, 8),
        (["nodes=2", "cluster.gpus_per_node=4", "cluster.gpus_per_process=2"], 2, 4),
        (["cluster.gpus_per_node=4", "parallel=data_parallel"], 1, 1),
    ],
)
def test_a_process_for_each_gpu_unless_something_else_is_asked_for(composer, words, processes, world_size):
    config = composer.compose(["cluster=slurm", "trainer.global_batch_size=96", *words])
    found = resources_of(config, {})
    assert (found.processes_per_node, found.world_size) == (processes, world_size)


def test_gpus_that_the_processes_cannot_share_evenly(composer):
    config = composer.compose(["cluster=slurm", "cluster.gpus_per_node=4"])
    config.cluster.gpus_per_process = 3
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_process=3: doesn't divide the 4 GPUs of a node"):
        resources_of(config, {})


def test_more_gpus_than_this_machine_has(composer):
    config = composer.compose([])
    config.cluster.gpus_per_node = 3
    problem = "the installed torch is built without CUDA" if installed_build() == "cpu" else "no visible GPU"
    with pytest.raises(ConfigError, match=rf"cluster\.gpus_per_node=3: .*{problem}; leave it"):
        resources_of(config, {"CUDA_VISIBLE_DEVICES": ""})
