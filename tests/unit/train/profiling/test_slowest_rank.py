from __future__ import annotations

import pytest

from hpctrain.train.profiling.measurements import RankReport
from hpctrain.train.profiling.slowest_rank import SlowestRank


def reports(*own_s, timed, loaded=0, data=(0.0, 0.0, 0.0)):
    """Three ranks, by the mean of their forward pass and of their wait for data."""
    return [
        RankReport(
            rank=rank,
            host="n1",
            steps_timed=timed,
            steps_loaded=loaded,
            parts={"data": data[rank], "forward": seconds, "optimizer": 9.0},
        )
        for rank, seconds in enumerate(own_s)
    ]


def test_a_stretch_counts_only_its_own_steps():
    slowest = SlowestRank()
    slowest.add(reports(1.0, 1.0, 3.0, timed=10))
    assert slowest.take_metrics() == {"throughput/slowest_rank": 2, "throughput/slowest_ratio": 3.0}
    assert slowest.take_metrics() == {}
    # over all 20 steps rank 2 is still the slowest, but in the last ten it was rank 0
    slowest.add(reports(1.5, 1.0, 2.0, timed=20))
    assert slowest.take_metrics() == {"throughput/slowest_rank": 0, "throughput/slowest_ratio": 2.0}


def test_waiting_for_data_is_counted_over_its_own_number_of_steps():
    slowest = SlowestRank()
    slowest.add(reports(1.0, 1.0, 1.0, timed=4, loaded=100, data=(0.0, 0.0, 0.0)))
    slowest.take_metrics()
    # rank 1 waited 300 s in 100 steps, while 4 were timed
    slowest.add(reports(1.0, 1.0, 1.0, timed=8, loaded=200, data=(0.0, 1.5, 0.0)))
    found = slowest.take_metrics()
    assert found == {"throughput/slowest_rank": 1, "throughput/slowest_ratio": pytest.approx(4.0)}


def test_a_stretch_with_few_steps_is_joined_with_the_next():
    slowest = SlowestRank()
    slowest.add(reports(1.0, 1.0, 1.0, timed=3))
    slowest.take_metrics()
    slowest.add(reports(1.0, 1.0, 2.0, timed=4))
    assert slowest.take_metrics() == {}
    slowest.add(reports(1.0, 1.0, 2.0, timed=6))
    assert slowest.take_metrics() == {"throughput/slowest_rank": 2, "throughput/slowest_ratio": 3.0}


def test_a_finding_waits_for_a_record_and_a_newer_one_replaces_it():
    slowest = SlowestRank()
    slowest.add(reports(1.0, 1.0, 3.0, timed=3))
    slowest.add(reports(1.5, 1.0, 2.0, timed=6))
    assert slowest.take_metrics()["throughput/slowest_rank"] == 0


def test_only_rank_zero_has_the_reports():
    slowest = SlowestRank()
    slowest.add([])
    slowest.add([])
    assert slowest.take_metrics() == {}


def test_one_rank_has_no_others():
    slowest = SlowestRank()
    slowest.add(reports(1.0, timed=10))
    assert slowest.take_metrics() == {}
