from __future__ import annotations

from hpctrain.run.job_records import JobRecords, cancelled_at


def test_submissions_are_kept_in_order(directory):
    assert JobRecords(directory).read() == []
    records = [{"job_id": "12_0", "time": 1.5, "log": "logs/12_0.log"}, {"job_id": "17", "time": 2.5, "log": None}]
    for record in records:
        JobRecords(directory).add(record)
    assert JobRecords(directory).read() == records


def test_a_wait_is_neither_a_submission_nor_withdraws_a_cancellation(directory):
    records = JobRecords(directory)
    records.wait("7")
    assert not records.is_own("7")
    records.add({"job_id": "7", "time": 1.0})
    records.add({"cancelled": True, "time": 2.0})
    records.wait("7")
    assert records.is_own("7")
    assert cancelled_at(records.read()) == 2.0
    assert (records.waits("7"), records.waits("8")) == (2, 0)
