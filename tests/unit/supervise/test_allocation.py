from __future__ import annotations

import pytest

from hpctrain.errors import ClusterEnvironmentError
from hpctrain.supervise.allocation import Allocation, allocation_overrides

FOUR = ("n1", "n2", "n3", "n4")


def test_ranks_move_to_the_spare_nodes_as_others_are_lost():
    nodes = Allocation(FOUR, node_counts=(2,), outlives_a_node=True)
    assert (nodes.step_nodes, nodes.spares) == (("n1", "n2"), 2)
    nodes.lose(["n2"])
    assert (nodes.step_nodes, nodes.spares) == (("n1", "n3"), 1)
    nodes.lose(["n2", "n4", "n1"])
    assert (nodes.step_nodes, nodes.spares) == (("n3",), -1)


def test_ranks_run_on_as_many_nodes_as_they_can_use():
    nodes = Allocation(FOUR, node_counts=(4, 2), outlives_a_node=True)
    assert (nodes.step_nodes, nodes.spares) == (FOUR, 2)
    nodes.lose(["n2"])
    assert (nodes.step_nodes, nodes.spares) == (("n1", "n3"), 1)
    nodes.lose(["n3"])
    assert (nodes.step_nodes, nodes.spares) == (("n1", "n4"), 0)
    nodes.lose(["n1"])
    assert (nodes.num_nodes, nodes.step_nodes, nodes.spares) == (2, ("n4",), -1)


def test_a_job_that_dies_with_any_node_has_none_to_spare():
    assert Allocation(FOUR, node_counts=(2,)).spares == 0


@pytest.mark.parametrize(
    ("unknown", "nodes"), [({}, 4), ({"SLURM_JOB_NUM_NODES": "four"}, 4), ({"SLURM_GPUS_ON_NODE": "?"}, 4)]
)
def test_a_run_takes_what_it_can_read_of_the_allocation_of_a_user_written_script(unknown, nodes):
    environ = {"SLURM_TASKS_PER_NODE": "2(x4)", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "2"} | unknown
    found = dict(word.split("=") for word in allocation_overrides(environ, []))
    assert (found["nodes"], found["cluster.processes_per_node"]) == ("4", "2")
    assert found.get("cluster.gpus_per_node") == (None if "SLURM_GPUS_ON_NODE" in unknown else "2")


def test_tasks_that_can_not_be_read_end_a_user_written_script():
    with pytest.raises(ClusterEnvironmentError, match="SLURM_TASKS_PER_NODE"):
        allocation_overrides({"SLURM_TASKS_PER_NODE": "two"}, [])
