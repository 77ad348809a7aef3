from __future__ import annotations

from hpctrain.attempt.outcome import judge
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.reason import Reason


def hang(rank, *, waits, time=0.0, reason=Reason.HANG):
    stack = f'  File "task.py", line {rank}, in loss\n'
    message = f"no step for 60 s; stacks: logs/stacks_1_{rank}.txt"
    return ExitRecord(
        rank=rank,
        host=f"n{rank}",
        reason=reason,
        step=7,
        message=message,
        traceback=stack,
        blames_peer=waits,
        time=time,
    )


def judged(*records, world_size):
    return judge({record.rank: record for record in records}, world_size, 0)


def test_the_rank_outside_of_a_collective_is_the_cause_even_if_it_spoke_last():
    lost = hang(2, waits=True, reason=Reason.INFRASTRUCTURE)
    outcome = judged(hang(0, waits=True, time=1.0), hang(1, waits=False, time=2.0), lost, world_size=3)
    assert (outcome.reason, outcome.exit_code, outcome.step) == (Reason.HANG, 1, 7)
    assert outcome.report.splitlines() == [
        "rank 1 on n1 hangs after step 7: no step for 60 s; stacks: logs/stacks_1_1.txt; rank 0 waited for others",
        '  File "task.py", line 1, in loss',
    ]


def test_where_the_others_wait_the_rank_without_a_word_is_named():
    outcome = judged(hang(0, waits=True), hang(2, waits=True, time=1.0), world_size=3)
    assert (outcome.reason, outcome.silent_ranks) == (Reason.HANG, (1,))
    assert outcome.report == (
        "rank 0 on n0 hangs after step 7: no step for 60 s; stacks: logs/stacks_1_0.txt; rank 1 left no word: stopped, "
        "its machine gone, or stuck outside of Python; rank 0, 2 waited for others"
    )


def test_a_rank_that_woke_up_when_the_others_ended_is_named():
    woken = hang(2, waits=True, reason=Reason.INFRASTRUCTURE, time=5.0)
    outcome = judged(hang(0, waits=True), hang(1, waits=True), woken, world_size=3)
    assert outcome.report.endswith(
        "; rank 2 saw no hang and then lost the others: it may have stood still; rank 0, 1 waited for others"
    )


def test_ranks_that_all_wait_blame_nobody():
    outcome = judged(hang(0, waits=True), hang(1, waits=True), world_size=2)
    assert outcome.report.endswith("; every rank waited for others")


def test_ranks_that_hang_alike_are_told_together():
    outcome = judged(*(hang(rank, waits=False, time=rank) for rank in range(12)), world_size=12)
    assert "rank 0 on n0 hangs" in outcome.report
    assert "; so does rank 1, 2, 3, 4, 5, 6, 7, 8 and 3 more\n" in outcome.report


def test_a_rank_that_raised_is_the_cause_of_the_others_hang():
    raised = hang(1, waits=False, time=9.0, reason=Reason.FAILED)
    assert judged(hang(0, waits=True), raised, world_size=2).reason is Reason.FAILED
