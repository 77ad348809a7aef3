import pytest

from hpctrain.config.cluster import Slurm
from hpctrain.errors import ConfigError

GPUS = {
    "gres": ["gpu", "gpu:4", "gpu:a100:4", "nvme:1,gpu:2", "gpu:a100:2(S:0)", "gres/gpu:1", "gres:gpu:1"],
    "tres_per_task": ["gres/gpu:1", "cpu=2,gres/gpu:a100:1"],
    "tres-per-task": ["gres/gpu=1"],
    "gpus": [4, "a100:4"],
    "gpus-per-task": [1],
    "gpus_per_socket": [2],
    "gpus-per-node": ["a100:4"],
}
"""What sbatch takes for GPUs, by key."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GPUS.items() for value in values])
@pytest.mark.parametrize("gpus_per_node", [None, 4])
def test_gpus_are_counted_by_one_key_alone(name, value, gpus_per_node):
    with pytest.raises(ConfigError, match=r"set cluster\.gpus_per_node=N") as caught:
        Slurm(sbatch={name: value}, gpus_per_node=gpus_per_node)
    assert str(caught.value).startswith(f"cluster.sbatch.{name}={value}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gres", "shard:1"),
        ("gres", "nvme:1"),
        ("gres", "gpu_memory:40"),
        ("gres", "vgpu:1,nvme:2"),
        ("tres-per-task", "cpu=4"),
        ("cpus-per-gpu", 4),
    ],
)
def test_other_resources_are_passed_on(name, value):
    assert Slurm(sbatch={name: value}).sbatch == {name: value}
