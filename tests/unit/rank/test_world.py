from __future__ import annotations

import os

import pytest
import torch

from hpctrain.cluster.environment import ClusterEnvironment, cpu_threads
from hpctrain.rank.world import World, bound_device, join

CPU = torch.device("cpu")
TWO_OF_FOUR = {
    "RANK": "2",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "12345",
}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


@pytest.fixture
def environment():
    return ClusterEnvironment.from_environment


def test_a_world_of_one_costs_no_call():
    world = World(rank=0, size=1, local_rank=0, devices=(CPU,))
    assert world.is_rank_zero
    assert world.gather("mine") == ["mine"]
    assert world.broadcast({"a": 1}) == {"a": 1}
    tensor = torch.ones(2)
    assert world.sum_(tensor) is tensor
    world.barrier()
    world.close()
    world.abort()
    assert world.communication_error() == ""


def test_joining_alone_makes_no_process_group(environment):
    world = join(environment({}), None, backend="auto", devices=(CPU,), timeout_s=1)
    assert (world.rank, world.size, world.local_rank, world.device, world.control) == (0, 1, 0, CPU, None)
    assert not torch.distributed.is_initialized()


def test_nccl_binds_to_a_device_that_is_the_only_one():
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert bound_device("nccl", (first,)) == first
    assert bound_device("nccl", (first, second)) is None
    assert bound_device("gloo", (first,)) is None
    assert bound_device("cpu:gloo,cuda:nccl", (first,)) is None


@pytest.mark.parametrize(
    ("variables", "configured", "expected"),
    [
        ({"OMP_NUM_THREADS": "3"}, 5, None),
        ({}, 5, 5),
        ({}, None, None),
        ({**TWO_OF_FOUR}, 5, 5),
        ({**TWO_OF_FOUR}, None, max(1, len(os.sched_getaffinity(0)) // 2)),
        ({**STEP, "SLURM_CPUS_PER_TASK": "6", "SLURM_CPUS_ON_NODE": "32"}, None, 6),
        ({**STEP, "SLURM_CPUS_ON_NODE": "32"}, None, 16),
        ({**STEP, "SLURM_CPUS_ON_NODE": "1"}, None, 1),
        ({**STEP, "SLURM_CPUS_ON_NODE": "32"}, 4, 4),
    ],
)
def test_threads_of_a_rank(environment, variables, configured, expected):
    assert cpu_threads(environment(variables), configured, variables) == expected
