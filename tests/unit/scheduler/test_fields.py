import pytest

from hpctrain.errors import SchedulerError
from hpctrain.scheduler import fields

NOTHING = ["", "(null)", "None", "N/A", "n/a", "Unknown", "NONE"]


@pytest.mark.parametrize("value", NOTHING)
def test_slurms_ways_to_say_nothing(value: str) -> None:
    assert fields.text(value) == ""
    assert fields.moment(value) is None


def test_moment() -> None:
    assert fields.moment("1795257041") == 1795257041
    assert fields.moment("0") is None


def test_a_number_of_a_newer_slurm_is_none_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert fields.optional_number("12") == 12
    assert (fields.optional_number("many"), fields.moment("tomorrow")) == (None, None)
    for value in ("many", "tomorrow"):
        assert f"can't parse the number '{value}' in SLURM's answer; treating it as unknown" in caplog.text


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
        (fields.array_tasks, "12_[a]"),
        (fields.array_tasks, "12_[1-99999999]"),
    ]:
        with pytest.raises(SchedulerError) as caught:
            read(value)
        assert repr(value) in str(caught.value) or value.split(":")[-1] in str(caught.value)
