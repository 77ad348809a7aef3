from __future__ import annotations

import pytest

from hpctrain.cli.drill import conclusion, main, table
from hpctrain.drill.comparison import Row
from hpctrain.drill.drill import Interruption, Report
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.reason import Reason

STOPS = (Interruption("SIGTERM", 13, Reason.INTERRUPTED), Interruption("SIGINT", 40, Reason.INTERRUPTED))
EQUAL = Row("weights digest", "0123456789abcdef" * 4, "0123456789abcdef" * 4, equal=True)
UNEQUAL = Row(
    "train/loss", "0.5, 60 values", "0.6, 60 values", equal=False, difference="first after step 14: 1.0 and 2.0"
)


@pytest.fixture
def report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*rows, interruptions=STOPS):
        runs = {name: RunDirectory.at(f"runs/drill/now/{name}") for name in ("straight", "interrupted")}
        return Report(**runs, interruptions=interruptions, rows=rows)

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


def test_without_an_interruption_nothing_is_proven(report):
    made = report(EQUAL, interruptions=())
    assert not made.exact
    assert conclusion(made).startswith(
        "nothing is proven: no interruption took effect before the run ended; train for longer"
    )


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
