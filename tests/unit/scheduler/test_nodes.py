from pathlib import Path

import pytest

from hpctrain.scheduler.nodes import failed

CAPTURED = (Path(__file__).parent / "captured" / "scontrol-nodes.txt").read_text()
"""n4 is dead and n3 well; slurmd began on all of them at 1795258447, and again on n4 at 1795261959."""


def test_dead_nodes_and_those_that_started_again_have_failed():
    assert failed(CAPTURED, since=1795261960) == ("n4",)
    assert failed(CAPTURED.replace("State=DOWN+NOT_RESPONDING", "State=IDLE"), since=1795261960) == ()
    assert failed(CAPTURED.replace("State=DOWN+NOT_RESPONDING", "State=IDLE"), since=1795260000) == ("n4",)
    assert failed(CAPTURED, since=0) == ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize("state", ["DOWN", "DOWN*", "IDLE*", "ALLOCATED+NOT_RESPONDING", "FAIL", "DOWN+DRAIN"])
def test_states_of_nodes_that_are_gone(state):
    assert failed(f"NodeName=n1 State={state} SlurmdStartTime=5", since=10) == ("n1",)


@pytest.mark.parametrize("state", ["IDLE", "ALLOCATED", "MIXED+DRAIN", "IDLE+COMPLETING", "RESERVED"])
def test_states_of_nodes_that_are_there(state):
    assert failed(f"NodeName=n1 State={state} SlurmdStartTime=5", since=10) == ()


def test_a_node_that_never_started_and_an_empty_answer():
    assert failed("NodeName=n1 State=IDLE SlurmdStartTime=None", since=10) == ()
    assert failed("", since=10) == ()
