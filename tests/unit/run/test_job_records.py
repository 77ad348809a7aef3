from __future__ import annotations

from hpctrain.run.job_records import JobRecords


def test_submissions_are_kept_in_order(directory):
    assert JobRecords(directory).read() == []
    records = [{"job_id": "12_0", "time": 1.5, "log": "logs/12_0.log"}, {"job_id": "17", "time": 2.5, "log": None}]
    for record in records:
        JobRecords(directory).add(record)
    assert JobRecords(directory).read() == records
