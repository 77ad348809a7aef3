from __future__ import annotations

import pytest

from hpctrain.supervise.allocation import Allocation

FOUR = ("n1", "n2", "n3", "n4")


def test_ranks_move_to_the_spare_nodes_as_others_are_lost():
    nodes = Allocation(FOUR, num_nodes=2, keeps_spares=True)
    assert (nodes.step_nodes, nodes.spares) == (("n1", "n2"), 2)
    nodes.lose(["n2"])
    assert (nodes.step_nodes, nodes.spares) == (("n1", "n3"), 1)
    nodes.lose(["n2", "n4", "n1"])
    assert (nodes.step_nodes, nodes.spares) == (("n3",), -1)


def test_a_job_that_dies_with_any_node_has_none_to_spare():
    assert Allocation(FOUR, num_nodes=2).spares == 0


@pytest.mark.parametrize(
    ("ranks", "blamed"), [([], ()), ([3], ("n4",)), ([2, 3], ("n4",)), ([0, 2], ()), ([0, 1, 2, 3], ()), ([7], ())]
)
def test_silent_ranks_point_at_their_nodes_unless_they_are_everywhere(ranks, blamed):
    nodes = Allocation(FOUR, num_nodes=2, keeps_spares=True)
    nodes.lose(["n1", "n3"])
    assert nodes.step_nodes == ("n2", "n4")
    assert nodes.of_ranks(ranks, processes_per_node=2) == blamed
