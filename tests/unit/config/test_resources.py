import pytest

from hpctrain.config.compose import Composer
from hpctrain.config.resources import count_devices, resources_of, visible_gpus
from hpctrain.errors import ConfigError


@pytest.fixture(scope="module")
def composer():
    return Composer()


@pytest.mark.parametrize(
    ("listed", "count"), [("", 0), ("0", 1), ("2, 3", 2), ("0,-1,1", 1), ("NoDevFiles", 0), ("GPU-1a,GPU-2b,,3", 2)]
)
def test_an_invalid_name_hides_its_device_and_all_later_ones(listed, count):
    assert count_devices(listed) == count


def test_gpus_are_those_of_the_driver_that_the_process_may_use(tmp_path):
    assert visible_gpus({}, tmp_path / "gpus") == 0
    for number in range(4):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    assert visible_gpus({}, tmp_path / "gpus") == 4
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,3"}, tmp_path / "gpus") == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}, tmp_path / "gpus") == 4
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,-5,1"}, tmp_path / "gpus") == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, tmp_path / "gpus") == 0


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
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node=3: this machine has no visible GPU; leave it"):
        resources_of(config, {"CUDA_VISIBLE_DEVICES": ""})
