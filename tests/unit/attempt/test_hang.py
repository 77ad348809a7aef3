from __future__ import annotations

import signal

from hpctrain.attempt.hang import GIL_HELD, alarm_complaint, hang_report
from hpctrain.attempt.outcome import Outcome
from hpctrain.run.exit_record import Collectives, ExitRecord
from hpctrain.run.reason import Reason

GROUP = "nccl default_pg"


def waits(rank, number, *, operation="all_reduce", begun=None):
    found = Collectives({GROUP: number if begun is None else begun}, GROUP, operation, number)
    return hang(rank, waits=True, collectives=found)


def hang(rank, *, waits, **fields):
    return ExitRecord(
        rank=rank,
        host=f"n{rank}",
        reason=Reason.HANG,
        step=7,
        message="no step for 60 s",
        blames_peer=waits,
        time=float(rank),
        **fields,
    )


def report(*records, silent=()):
    return hang_report({one.rank: one for one in records}, silent, " after step 7")


def test_the_rank_that_waits_for_none_is_named_with_what_the_others_wait_for():
    idle = hang(2, waits=False, collectives=Collectives({GROUP: 119}))
    assert report(waits(0, 120), waits(1, 120), idle) == (
        "rank 2 on n2 hangs after step 7: no step for 60 s; ranks 0, 1 waited for others in all_reduce (collective "
        "120 of nccl default_pg)"
    )


def test_if_all_wait_the_one_that_left_out_a_collective_is_named():
    assert report(waits(0, 120), waits(1, 119, operation="broadcast"), waits(2, 120)) == (
        "rank 1 on n1 hangs after step 7: no step for 60 s; rank 1 began only 119 collectives of nccl default_pg, "
        "other ranks up to 120: rank 1 probably skipped a collective, or called them in another order; ranks 0, 2 "
        "waited for others in all_reduce (collective 120 of nccl default_pg)"
    )


def test_if_all_wait_for_the_same_collective_none_is_blamed():
    assert report(waits(0, 120), waits(1, 120)) == (
        "rank 0 on n0 hangs after step 7: no step for 60 s; every rank waited for others in all_reduce (collective "
        "120 of nccl default_pg)"
    )


def test_ranks_whose_collectives_arent_known_cannot_be_compared():
    assert report(waits(0, 120), hang(1, waits=True)).endswith("; every rank waited for others")


def test_different_collectives_are_not_named_as_one():
    assert report(waits(0, 120), waits(1, 119, begun=120), silent=[2]).endswith("; ranks 0, 1 waited for others")


def test_a_rank_that_ended_by_the_timers_alarm_hung():
    complaint = alarm_complaint([0, -signal.SIGALRM, None])
    assert complaint == "rank 1: Alarm clock"
    done = ExitRecord(rank=0, host="n0", reason=Reason.INFRASTRUCTURE, step=7, blames_peer=True)
    for said in (complaint, "n1: task 1: Alarm clock"):
        outcome = Outcome.from_records({0: done}, 2, 0, said)
        assert (outcome.reason, outcome.silent_ranks) == (Reason.HANG, (1,))
        assert outcome.report == (f"rank 1 of 2 ended without an exit record: {said}; {GIL_HELD}")
    assert alarm_complaint([0, -signal.SIGKILL, None]) == ""
