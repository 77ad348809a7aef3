import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.resources import ranks_per_node, resources_of
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


@pytest.fixture
def uncounted(monkeypatch):
    """A machine whose GPUs, if it has any, only torch can count."""
    monkeypatch.setattr("hpctrain.config.resources.visible_gpus", lambda environ, build=None: None)


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize(
    ("words", "gpus", "processes"),
    [
        ([], None, 1),
        (["precision=tf32"], None, 1),
        (["cluster.gpus_per_process=2"], None, 1),
        (["cluster.gpus_per_node=4"], 4, 4),
        (["cluster.gpus_per_node=0"], 0, 1),
        (["cluster.processes_per_node=2"], None, 2),
    ],
)
def test_gpus_that_cannot_be_counted_are_left_to_the_ranks(composer, words, gpus, processes):
    resources = resources_of(composer.compose(words), {})
    assert (resources.gpus_per_node, resources.processes_per_node) == (gpus, processes)


def test_the_ranks_of_a_node_are_known_if_the_configuration_says_so(composer):
    config = composer.compose(["parallel=fsdp_tp", "task=text"], world_size=8, local_world_size=4)
    with pytest.raises(ConfigError) as caught:
        ranks_per_node(config, 8)
    assert str(caught.value) == (
        "parallel.tensor_degree=null: is the number of ranks of a node, which isn't known for 8 ranks; set it to that "
        "number, or set cluster.processes_per_node"
    )
    config.cluster.processes_per_node = 2
    assert ranks_per_node(config, 8) == 2
    # without such a degree, it doesn't matter
    assert ranks_per_node(composer.compose(["parallel=fsdp"]), 8) == 8


def test_ranks_of_another_launcher_say_how_many_share_a_node(composer):
    config = composer.compose(["parallel=fsdp_tp", "task=text"], world_size=8, local_world_size=2)
    assert config.parallel.tensor_degree is None
    with pytest.raises(ConfigError, match=r"parallel.tensor_degree=8: doesn't divide model.num_heads=4"):
        composer.compose(["parallel=fsdp_tp", "task=text"], world_size=8, local_world_size=8)
