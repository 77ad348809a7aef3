from __future__ import annotations

from hpctrain.attempt.requeue import next_pause
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason


def test_a_run_pauses_at_a_step_once():
    paused = Attempt(attempt=1, reason=Reason.PAUSED, end_step=40)
    killed = Attempt(attempt=2, reason=Reason.PREEMPTED, end_step=70)
    assert [next_pause([paused, killed], step) for step in (None, 30, 40, 41)] == [None, None, None, 41]
    assert next_pause([killed], 30) == 30
