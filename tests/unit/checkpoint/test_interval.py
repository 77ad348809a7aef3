import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.saver import PRIOR_S, best_interval_s, mean_time_between_failures_s
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason


def lost_share(interval, cost, mtbf):
    """Daly's complete expected wall time per useful second, restart time left out."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


@given(st.floats(0.01, 600), st.floats(3600, 1e6))
def test_no_other_interval_loses_noticeably_less(cost, mtbf):
    best = best_interval_s(cost, mtbf)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert lost_share(best, cost, mtbf) <= lost_share(best * factor, cost, mtbf) * 1.001


def test_a_cheap_save_is_made_often_and_a_dear_one_seldom():
    assert best_interval_s(0.1, 86400) == pytest.approx(math.sqrt(2 * 0.1 * 86400), rel=0.01)
    assert best_interval_s(60, 86400) > 10 * best_interval_s(0.1, 86400)
    assert best_interval_s(1000, 100) == 100
    assert best_interval_s(0.0, 100) == 1.0


def entry(number, start, end, reason):
    return Attempt(attempt=number, start_time=start, end_time=end, reason=reason)


def test_failures_shorten_the_time_between_them():
    calm = [entry(1, 0.0, 3600.0, Reason.PREEMPTED), entry(2, 3700.0, None, None)]
    assert mean_time_between_failures_s(calm, now=7300.0) == 7200.0 + PRIOR_S
    rough = [entry(n, n * 1000.0, n * 1000.0 + 900.0, Reason.NODE_FAILURE) for n in range(9)]
    assert mean_time_between_failures_s(rough, now=9000.0) == (9 * 900.0 + PRIOR_S) / 10
