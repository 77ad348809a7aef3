from __future__ import annotations

import pytest

from hpctrain.run.handover import Handover


@pytest.mark.parametrize(
    "passed",
    [
        Handover(),
        Handover(attempt=3),
        Handover(attempt=1, logged=True, store="/tmp/a/store", parent=4321, terminal=7),
        Handover(attempt=1, code="d1", version="0.1.0"),
    ],
)
def test_a_rank_reads_what_its_launcher_passed(passed):
    assert Handover.read({"PATH": "/bin", **passed.variables()}) == passed


def test_the_variables_by_name():
    assert Handover().variables() == {}
    assert Handover(attempt=2, logged=True, store="/tmp/a/store", parent=7, terminal=9).variables() == {
        "HPCTRAIN_CLAIM": "2",
        "HPCTRAIN_LOGGED": "1",
        "HPCTRAIN_STORE": "/tmp/a/store",
        "HPCTRAIN_PARENT": "7",
        "HPCTRAIN_TERMINAL": "9",
    }


def test_a_rank_that_nothing_launched():
    assert Handover.read({"HPCTRAIN_CLAIM": "", "HPCTRAIN_LOGGED": "0"}) == Handover()
