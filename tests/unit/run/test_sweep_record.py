"""The record of a sweep: written atomically, read whatever its state, and asked whether its time is over."""

from __future__ import annotations

import json

import pytest

from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.sweep_record import SweepRecord, sweep_is_over
from hpctrain.search.distribution import distributions_of


@pytest.fixture
def home(tmp_path):
    return RunDirectory.at(tmp_path)


def record(**changed):
    given = {
        "kind": "random",
        "space": {"seed": "1,2"},
        "fixed": ["nodes=2"],
        "folder": "/home/me",
        "submitted": 100.0,
        "command": ["python", "-m", "hpctrain", "-m", "seed=1,2"],
        "seed": 0,
        "num_runs": 20,
    }
    return SweepRecord(**(given | changed))


def test_what_is_written_is_read(home):
    home.path.chmod(0o750)
    written = record(earlier=[{"space": {"seed": "1"}, "num_runs": 1}])
    written.write(home, 0o750)
    assert SweepRecord.read(home) == SweepRecord.read(home.path) == written
    assert home.sweep.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in home.path.iterdir()] == ["sweep.json"]


def test_a_folder_without_a_record_has_none(home):
    assert SweepRecord.read(home) is None
    assert SweepRecord.read(home.path / "nothing" / "here") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "ran', "expected a JSON object.*type the sweep's command again"),
        ("[]", "expected a JSON object"),
        ("{}", "kind is missing"),
        ({"kind": "random"}, "space is missing"),
        ({"num_runs": "many"}, "expected num_runs to be a whole number from 0 to 10000, found 'many'"),
        ({"num_runs": 2**62}, "expected num_runs to be a whole number from 0 to 10000"),
        ({"num_runs": None}, "num_runs is missing"),
        ({"deadline": True}, "expected deadline to be a number, found True"),
        ({"space": {"seed": 1}}, "expected space to be an object of strings"),
        ({"folder": "a\0b"}, "expected folder to be a path"),
        ({"earlier": [{"space": {}}]}, "expected earlier to be a list of objects with space, num_runs"),
        ({"kind": "asha", "seed": 1}, "min_steps is missing"),
    ],
)
def test_a_damaged_record_is_named_with_what_to_do(home, content, message):
    if isinstance(content, dict):
        whole = {} if content == {"kind": "random"} else {name: getattr(record(), name) for name in record().__slots__}
        content = json.dumps(whole | content)
    home.sweep.write_text(content)
    with pytest.raises(RunDirectoryError, match=f"sweep.json: .*{message}"):
        SweepRecord.read(home)


def test_values_that_are_no_override_are_named():
    damaged = record(kind="asha", min_steps=1, reduction_factor=2, space={"seed": "\u202e[red]"})
    with pytest.raises(RunDirectoryError, match=r"sweep\.json: space can't be parsed: .*repair it"):
        distributions_of(damaged)


def test_a_later_version_may_add_fields(home):
    record().write(home, 0o750)
    home.sweep.write_text(json.dumps(json.loads(home.sweep.read_text()) | {"later": 1}))
    assert SweepRecord.read(home).kind == "random"


def test_the_time_of_a_sweep_is_over_after_its_deadline(home):
    run = RunDirectory(home.path / "0")
    assert not sweep_is_over(run, 1e12)
    record().write(home, 0o750)
    assert not sweep_is_over(run, 1e12)
    record(deadline=160.0).write(home, 0o750)
    assert (sweep_is_over(run, 159.0), sweep_is_over(run, 160.0)) == (False, True)
    assert not sweep_is_over(RunDirectory(home.path / "lr"), 1e12)
    home.sweep.write_text("{")
    assert not sweep_is_over(run, 1e12)
