from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import SchedulerError
from hpctrain.scheduler import fields

NOTHING = ["", "(null)", "None", "N/A", "n/a", "Unknown", "NONE"]


@pytest.mark.parametrize("value", NOTHING)
def test_slurms_ways_to_say_nothing(value: str) -> None:
    assert fields.text(value) == ""
    assert fields.moment(value) is None
    assert fields.duration_s(value) is None
    assert fields.exit_code(value) is None
    assert fields.nodes(value) == ()


def test_moment() -> None:
    assert fields.moment("1795257041") == 1795257041
    assert fields.moment("0") is None
    assert fields.moment("2026-11-21T10:30:41") == int(datetime(2026, 11, 21, 10, 30, 41).timestamp())


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5:00", 300), ("30:00", 1800), ("01:00:00", 3600), ("365-00:00:00", 31536000), ("1-00:05:00", 86700)],
)
def test_duration(value: str, seconds: int) -> None:
    assert fields.duration_s(value) == seconds


@pytest.mark.parametrize("value", ["UNLIMITED", "Partition_Limit", "INVALID"])
def test_no_limit(value: str) -> None:
    assert fields.duration_s(value) is None


@given(st.integers(0, 40_000_000))
def test_duration_reads_what_slurm_writes(seconds: int) -> None:
    minutes, rest = divmod(seconds, 60)
    days, hours = divmod(minutes // 60, 24)
    text = f"{days}-{hours:02d}:{minutes % 60:02d}:{rest:02d}" if days else f"{hours:02d}:{minutes % 60:02d}:{rest:02d}"
    assert fields.duration_s(text) == seconds


@pytest.mark.parametrize(
    ("value", "found"), [("3:0", (3, 0)), ("0:15", (0, 15)), ("768", (3, 0)), ("15", (0, 15)), ("0", (0, 0))]
)
def test_exit_code(value: str, found: tuple[int, int]) -> None:
    assert fields.exit_code(value) == found


def test_nodes() -> None:
    assert fields.nodes("n[1-2],x") == ("n1", "n2", "x")
    assert fields.nodes("None assigned") == ()


@pytest.mark.parametrize(
    ("job_id", "ids"),
    [
        ("12", "12"),
        ("12_3", "12_3"),
        ("12_[4-6%2]", "12_4 12_5 12_6"),
        ("12_[1,3,5-9:2]", "12_1 12_3 12_5 12_7 12_9"),
    ],
)
def test_array_tasks(job_id: str, ids: str) -> None:
    assert fields.array_tasks(job_id) == ids.split()


def test_what_cannot_be_read_is_an_error_that_shows_it() -> None:
    for read, value in [
        (fields.number, "many"),
        (fields.moment, "tomorrow"),
        (fields.duration_s, "90"),
        (fields.exit_code, "3:x"),
        (fields.nodes, "n[1-"),
        (fields.array_tasks, "12_[a]"),
        (fields.array_tasks, "12_[1-99999999]"),
    ]:
        with pytest.raises(SchedulerError) as caught:
            read(value)
        assert repr(value) in str(caught.value) or value.split(":")[-1] in str(caught.value)
