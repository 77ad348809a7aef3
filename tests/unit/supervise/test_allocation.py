from __future__ import annotations

import pytest

from hpctrain.supervise.allocation import Allocation

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
    ("ranks", "blamed"), [([], ()), ([3], ("n4",)), ([2, 3], ("n4",)), ([0, 2], ()), ([0, 1, 2, 3], ()), ([7], ())]
)
def test_silent_ranks_point_at_their_nodes_unless_they_are_everywhere(ranks, blamed):
    nodes = Allocation(FOUR, node_counts=(2,), outlives_a_node=True, ranks_per_node=2)
    nodes.lose(["n1", "n3"])
    assert nodes.step_nodes == ("n2", "n4")
    assert nodes.of_ranks(ranks) == blamed


@pytest.mark.parametrize(
    ("ranks_per_node", "rank", "node"), [(2, 0, "n1"), (2, 3, "n2"), (2, 4, None), (1, 1, "n2"), (None, 0, None)]
)
def test_the_node_of_a_rank_is_known_where_ranks_are_consecutive(ranks_per_node, rank, node):
    assert Allocation(FOUR, node_counts=(2,), ranks_per_node=ranks_per_node).of_rank(rank) == node
