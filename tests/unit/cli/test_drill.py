from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.cli.drill import as_json, closing, conclusion, main, table
from hpctrain.drill.comparison import ComparisonRow
from hpctrain.drill.drill import Interruption, Report, unproven
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.reason import Reason

STOPS = (
    Interruption(how="SIGTERM", step=13, running_s=1.0, reason=Reason.INTERRUPTED),
    Interruption(how="SIGINT", step=40, running_s=2.0, reason=Reason.INTERRUPTED),
)
TIMED = Interruption(how="SIGINT", step=None, running_s=2.04, reason=Reason.INTERRUPTED)
EQUAL = ComparisonRow("weights digest", "0123456789abcdef" * 4, "0123456789abcdef" * 4, equal=True)
UNEQUAL = ComparisonRow(
    "train/loss", "0.5, 60 values", "0.6, 60 values", equal=False, difference="first after step 14: 1.0 and 2.0"
)


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*rows, interruptions=STOPS, **fields):
        runs = {name: RunDirectory.at(f"runs/drill/now/{name}") for name in ("straight", "interrupted")}
        return Report(**runs, interruptions=interruptions, rows=rows, **fields)

    return make


def test_the_table_of_an_exact_drill(report):
    made = report(EQUAL)
    assert table(made).splitlines() == [
        "                STRAIGHT         INTERRUPTED",
        "attempts        1                3",
        "weights digest  0123456789ab...  0123456789ab...  equal",
    ]
    assert made.exact
    assert conclusion(made) == "exact: interrupted after steps 13, 40, nothing differs. The runs are in runs/drill/now"


def test_what_differs_is_named(report):
    made = report(EQUAL, UNEQUAL)
    assert table(made).splitlines()[-1].endswith("  DIFFERS, first after step 14: 1.0 and 2.0")
    assert not made.exact
    assert conclusion(made).startswith("not exact: interrupted after steps 13, 40, and these differ: train/loss. ")


CLOSE = ComparisonRow(
    "tensors", "12", "12", equal=False, difference="1 of them, most of all w by 2e-06", relative=3.1e-7
)


def test_a_tolerance_accepts_small_differences(report):
    made = report(EQUAL, CLOSE, tolerance=1e-6)
    assert table(made).splitlines()[-1].endswith("  within 1e-06, 1 of them, most of all w by 2e-06, relative 3.1e-07")
    assert (made.exact, made.accepted) == (False, True)
    assert conclusion(made).startswith(
        "equal within 1e-06: interrupted after steps 13, 40, the largest relative difference is 3.1e-07 (tensors). "
    )
    refused = report(EQUAL, CLOSE, tolerance=1e-7)
    assert not refused.accepted
    assert conclusion(refused).startswith("not exact: interrupted after steps 13, 40, and these differ: tensors. ")
    assert not report(UNEQUAL, tolerance=1.0).accepted


def test_what_proves_nothing_is_not_accepted(report):
    made = report(EQUAL, unproven="no tensors", notes=("numbers differ",), tolerance=1.0)
    assert not made.accepted
    assert closing(made) == ["numbers differ", "nothing is proven: no tensors. The runs are in runs/drill/now"]
    assert as_json(made)["unproven"] == "no tensors"


def test_interruptions_without_steps_are_times(report):
    assert "interrupted after 2.0 s, nothing differs" in conclusion(report(EQUAL, interruptions=(TIMED,)))


def test_interruptions_prove_something_if_they_took_effect_after_a_save():
    assert unproven(STOPS, "wait") == ""
    assert unproven((), "wait") == "no interruption took effect before the run ended; wait"
    unsaved = replace(TIMED, saved=False)
    assert unproven((unsaved,), "wait").startswith("the run had saved nothing when it was interrupted")
    assert unproven((unsaved, TIMED), "wait") == ""


@pytest.mark.parametrize("words", [["trainer.max_steps=none"], ["trainer.max_stepps=5"], ["no.such=1", "--json"]])
def test_overrides_that_cannot_work_write_nothing(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        main(words)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(RunDirectoryError, match="the folder isn't empty"):
        main([f"run_dir={tmp_path}"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_how_many_interruptions_make_sense(count, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--interruptions", count])
    assert raised.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_help_has_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    assert "Exit code 0 if nothing differs" in capsys.readouterr().out


PROGRAM = ["run", "trainer.max_steps=3", "--", "true"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (PROGRAM, "belongs to hpctrain's own training"),
        (["optimizer.lr=1,2"], r"has several values; write optimizer\.lr="),
        (["run", "args.x=1,2", "--", "true"], r"has several values; write args\.x="),
        (["run", "--", "true", "{args.x}"], r"args\.x is not set; add args\.x=VALUE before --"),
        (["run", "--", "no-such-program"], "no such program is in PATH"),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_anything_is_written(words, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        main(words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["run"], "there is no -- with a command after it"),
        (["run", "-m", "args.x=1,2", "--", "true"], "a drill is of one run; type one command for each value"),
        (
            ["python", "train.py"],
            "python is not KEY=VALUE; to drill a program, write python -m hpctrain drill run -- C",
        ),
        (["--", "train.py"], "is not KEY=VALUE; to drill a program, write python -m hpctrain drill run -- COMMAND"),
        (
            ["run", "python", "train.py"],
            "-- belongs before python; write python -m hpctrain drill run -- python train.py",
        ),
    ],
)
def test_a_missing_command_is_refused_before_anything_is_written(words, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_after_the_dashes_are_the_programs(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["run", "--tolerance", "-1", "--", "true"])
    assert raised.value.code == 2
    assert "from 0 to inf" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--help", "--", "true"])
    assert "Exit code 0 if nothing differs, or nothing by more than --tolerance" in capsys.readouterr().out
