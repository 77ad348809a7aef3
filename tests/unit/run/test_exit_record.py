from __future__ import annotations

import json

import pytest

from hpctrain.run.exit_record import Collectives, ExitRecord, first_cause, read_exit_records
from hpctrain.run.reason import Reason


def record(rank, reason=Reason.FAILED, **fields):
    return ExitRecord(rank=rank, host=f"n{rank}", reason=reason, step=7, **fields)


def test_records_go_there_and_back(tmp_path):
    written = [
        record(0, Reason.COMPLETED, time=3.5),
        record(
            11,
            message="ValueError: ü\0",
            traceback="Traceback ...\n  line\n",
            blames_peer=True,
            collectives=Collectives({"nccl default_pg": 7}, "nccl default_pg", "all_reduce", 7),
        ),
    ]
    for one in written:
        one.write(tmp_path)
    assert read_exit_records(tmp_path) == {0: written[0], 11: written[1]}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"rank": 1}', '{"rank": 1, "host": "n", "reason": "odd", "step": 1}']
)
def test_what_is_unreadable_counts_as_absent(tmp_path, content):
    record(0).write(tmp_path)
    (tmp_path / "rank_1.json").write_text(content)
    (tmp_path / "owner.json").write_text("{}")
    assert set(read_exit_records(tmp_path)) == {0}


@pytest.mark.parametrize("value", [None, 3, {"begun": {"a": -1}, "group": "", "operation": "", "number": 0}])
def test_collectives_of_another_form_are_left_out(tmp_path, value):
    content = {"rank": 1, "host": "n", "reason": "hang", "step": 1, "collectives": value}
    (tmp_path / "rank_1.json").write_text(json.dumps(content))
    assert read_exit_records(tmp_path)[1].collectives is None


def test_no_claim_is_no_record(tmp_path):
    assert read_exit_records(tmp_path / "0001") == {}


def test_the_cause_is_the_earliest_failure_that_blames_no_peer():
    records = [
        record(0, time=1.0, blames_peer=True),
        record(1, time=3.0),
        record(2, time=2.0),
        record(3, Reason.COMPLETED, time=0.5),
        record(4, Reason.INTERRUPTED, time=0.1),
    ]
    cause = first_cause({one.rank: one for one in records})
    assert cause is not None
    assert cause.rank == 2


def test_of_ranks_that_failed_alike_rank_zero_is_named_which_printed_the_error():
    records = [record(0, message="ConfigError: no", time=2.0), record(1, message="ConfigError: no", time=1.0)]
    assert first_cause(dict(enumerate(records))) is records[0]


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        (Reason.FAILED, {"message": "ValueError: other"}),
        (Reason.FAILED, {"message": "no", "blames_peer": True}),
        (Reason.COMPLETED, {"message": "no"}),
    ],
)
def test_a_rank_zero_that_ended_otherwise_is_not_named(reason, fields):
    records = [record(0, reason, time=2.0, **fields), record(1, message="no", time=1.0)]
    assert first_cause(dict(enumerate(records))) is records[1]


def test_of_broken_machines_the_first_is_named():
    records = [record(rank, Reason.INFRASTRUCTURE, message="no", time=2.0 - rank) for rank in range(2)]
    assert first_cause(dict(enumerate(records))) is records[1]


def test_where_all_blame_a_peer_the_earliest_is_the_best_guess():
    cause = first_cause({rank: record(rank, time=9.0 - rank, blames_peer=True) for rank in range(3)})
    assert cause is not None
    assert cause.rank == 2


def test_a_rank_that_hung_comes_before_those_that_lost_it():
    records = [
        record(0, Reason.INFRASTRUCTURE, time=1.0, blames_peer=True),
        record(1, Reason.HANG, time=3.0, blames_peer=True),
        record(2, Reason.HANG, time=2.0, blames_peer=True),
    ]
    cause = first_cause({one.rank: one for one in records})
    assert cause is not None
    assert cause.rank == 2


def test_no_failure_has_no_cause():
    assert first_cause({0: record(0, Reason.COMPLETED)}) is None
    assert first_cause({}) is None
