"""A sweep is extended from its record: more values, more runs; and what would change the runs that exist is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.cli import main
from hpctrain.errors import ExitCode
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.resume import SweepResume, needs_record, resume_search
from hpctrain.search.search import Search
from tests.support.searching import prepared, train

pytestmark = pytest.mark.usefixtures("as_before")

TINY = ("model=convnet", "model.width=1", "trainer.max_steps=1", "logger.tensorboard=false", "code.snapshot=none")
DRAWN = ("sweep=random", "optimizer.lr=tag(log,interval(1e-4,1e-1))")


def rates(home):
    """The learning rate of each run, by its number."""
    runs = sorted((run for run in home.iterdir() if run.name.isdecimal()), key=lambda run: int(run.name))
    return [yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] for run in runs]


def num_attempts(home):
    """Attempts of each of three runs."""
    return [len(Ledger(RunDirectory.at(home / str(number))).attempts()) for number in range(3)]


def made(tmp_path, *words):
    """A sweep of two runs."""
    assert main(["-m", "run_dir=sweep", *TINY, *words]) == 0
    return tmp_path / "sweep"


def test_another_value_is_another_run(tmp_path):
    home = made(tmp_path, "optimizer.lr=0.1,0.01")
    assert main(["resume", "sweep", "optimizer.lr=0.001,0.01"]) == 0
    assert sorted(rates(home)) == [0.001, 0.01, 0.1]
    assert rates(home)[:2] == [0.1, 0.01]
    assert num_attempts(home) == [1, 1, 1]


def test_one_value_of_a_varied_key_adds_its_runs_and_changes_none(tmp_path, capsys):
    home = made(tmp_path, "optimizer.lr=0.1,0.01")
    assert main(["resume", "sweep", "optimizer.lr=0.001"]) == 0
    assert rates(home) == [0.1, 0.01, 0.001]
    assert SweepRecord.read(home).space == {"optimizer.lr": "0.1,0.01,0.001"}
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    for words in (["optimizer.lr=0.5", "resume.allow_config_change=true"], ["model.width=2"]):
        assert main(["resume", "sweep", *words]) == 2
        assert "would change the existing runs" in capsys.readouterr().err
    words = ["model.width=2", "resume.allow_config_change=true"]
    assert main(["resume", "sweep", *words]) == 2
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    assert main(["resume", "sweep/0", *words]) == 0
    assert "nothing is left to train, and nothing was changed" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


@pytest.mark.nightly
def test_null_is_a_value_like_others(tmp_path):
    home = made(tmp_path, "trainer.clip_grad_norm=0.5,1.0")
    assert main(["resume", "sweep", "trainer.clip_grad_norm=null"]) == 0
    assert num_attempts(home) == [1, 1, 1]
    assert SweepRecord.read(home).space == {"trainer.clip_grad_norm": "0.5,1.0,null"}


@pytest.mark.nightly
def test_a_run_that_trained_with_two_values_is_shown_with_both(tmp_path, capsys):
    home = made(tmp_path, "optimizer.lr=0.1,0.01")
    words = ["optimizer.lr=0.5", "trainer.max_steps=2", "resume.allow_config_change=true"]
    assert main(["resume", "sweep/0", *words]) == 0
    assert rates(home) == [0.5, 0.01]
    capsys.readouterr()
    for words in (["best", "sweep"], ["status", "sweep"], ["status", "sweep/0"], ["compare", "sweep/0", "sweep/1"]):
        assert main(words) == 0
        assert "0.1 until step 1, then 0.5" in capsys.readouterr().out
    # neither value has a run of its own any more
    assert main(["resume", "sweep", "optimizer.lr=0.5"]) == 0
    assert rates(home) == [0.5, 0.01, 0.5]
    # the whole grid, in which each new value meets all of another key
    for word in ("seed=1,2", "optimizer.lr=0.2"):
        assert main(["resume", "sweep", word]) == 0
    assert len(rates(home)) == 3 + 6 + 2
    assert SweepRecord.read(home).space == {"optimizer.lr": "0.1,0.01,0.5,0.2", "seed": "1,2"}


@pytest.mark.nightly
def test_one_value_adds_runs_of_a_program_as_it_was_typed(tmp_path, capfd):
    words = ["run_dir=sweep", "code.snapshot=none", "args.v=1.1,1.20", "args.b=[1],[+2]"]
    assert main(["run", "-m", *words, "--", "echo", "got {args.v} {args.b}"]) == 0
    assert main(["resume", "sweep", "args.v=1.30"]) == 0
    got = [line for line in capfd.readouterr().out.splitlines() if line.startswith("got")]
    assert got == [f"got {v} {b}" for v in ("1.1", "1.20", "1.30") for b in ("1", "+2")]


def test_more_runs_are_those_of_one_command(tmp_path):
    home = made(tmp_path, *DRAWN, "sweep.num_runs=2")
    before = rates(home)
    assert main(["resume", "sweep", "sweep.num_runs=3", "optimizer.lr=tag(log,interval(1e-6,1e-5))"]) == 0
    after = rates(home)
    assert after[:2] == before
    assert 1e-6 <= after[2] <= 1e-5
    assert num_attempts(home) == [1, 1, 1]
    record = SweepRecord.read(home)
    assert (record.num_runs, record.seed, [one["num_runs"] for one in record.earlier]) == (3, 0, [2])


@pytest.fixture
def drawn(tmp_path, capsys):
    """The record of two runs that were drawn; what is refused needs no more."""
    home = RunDirectory.at(tmp_path / "sweep")
    home.path.mkdir()
    SweepRecord(
        kind="random",
        space={"optimizer.lr": "tag(log,interval(1e-4,1e-1))"},
        fixed=[*TINY],
        folder=str(tmp_path),
        submitted=0.0,
        command=[],
        seed=0,
        num_runs=2,
    ).write(home, 0o750)
    before = home.sweep.read_bytes()
    yield home
    assert [path.name for path in home.path.iterdir()] == ["sweep.json"]
    assert home.sweep.read_bytes() == before


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "sweep.num_runs=1",
            "sweep.num_runs=1: is less than the 2 runs that the sweep already has; give the total number",
        ),
        ("sweep.seed=3", "sweep.seed=3: can't be changed: the existing runs were made with sweep.seed=0"),
        ("sweep=grid", "sweep=grid: can't be changed: the existing runs were made with sweep=random"),
        ("sweep=optuna", "sweep=optuna: can't be changed: the existing runs were made with sweep=random"),
        (
            "optimizer.lr=choice(0.1,0.2)",
            "is a new range, but all 2 runs have been drawn; add sweep.num_runs=N, with N above 2",
        ),
        ("seed=1,2", "seed=1,2: is not a key that the sweep draws; give a new range for optimizer.lr, or type"),
        ("sweep.min_steps=4", "exists only with sweep=asha, and this is a sweep=random; leave it out"),
    ],
)
def test_what_would_change_the_runs_is_refused(drawn, capsys, typed, message):
    assert main(["resume", "sweep", typed]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["sweep.min_steps=4", "sweep.reduction_factor=2"])
def test_the_rungs_of_a_search_are_kept(drawn, capsys, typed):
    record = replace(
        SweepRecord.read(drawn), kind="asha", min_steps=2, reduction_factor=3, fixed=["trainer.max_steps=20"]
    )
    before = drawn.sweep.read_bytes()
    record.write(drawn, 0o750)
    assert main(["resume", "sweep", typed]) == 2
    key, _, _ = typed.partition("=")
    made_with = f"{key}={getattr(record, key.removeprefix('sweep.'))}"
    assert f"{typed}: can't be changed: the existing runs were made with {made_with}" in capsys.readouterr().err
    assert SweepRecord.read(drawn) == record
    drawn.sweep.write_bytes(before)


@pytest.mark.parametrize(
    ("space", "typed"),
    [
        ("choice(0.1,0.2)", "choice(0.1,0.3)"),
        ("tag(log,interval(1e-4,0.1))", "interval(1e-4,0.1)"),
        ("0.1,0.2", "interval(0.1,0.2)"),
    ],
)
def test_optuna_continues_with_other_bounds_alone(drawn, capsys, space, typed):
    before = drawn.sweep.read_bytes()
    record = replace(
        SweepRecord.read(drawn), kind="optuna", sampler="tpe", startup_runs=2, space={"optimizer.lr": space}
    )
    record.write(drawn, 0o750)
    assert main(["resume", "sweep", "sweep.num_runs=4", f"optimizer.lr={typed}"]) == 2
    refused = (
        f"optimizer.lr={typed}: can't continue {space}: Optuna takes other bounds of an interval, and nothing else"
    )
    assert refused in capsys.readouterr().err
    assert SweepRecord.read(drawn) == record
    drawn.sweep.write_bytes(before)


def test_a_list_that_slurm_takes_is_one_value(drawn, capsys):
    assert main(["resume", "sweep", "sweep.num_runs=3", "cluster.exclude=n1,n2"]) == 2
    assert "cluster.exclude=n1,n2: would change the existing runs; name the" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("space", "typed", "needed"),
    [
        ({}, "cluster.exclude=n1,n2", False),
        ({"cluster.partition": "low,high"}, "cluster.partition=low,debug", True),
        ({}, "cluster.partition=choice(low,high)", True),
        ({}, "optimizer.lr=0.1,0.2", True),
        ({}, "optimizer.betas=[0.9,0.99]", False),
        ({}, "optimizer.lr=0.1", False),
        ({"optimizer.lr": "0.1,0.2"}, "optimizer.lr=0.3", True),
        ({"+task.width": "16,32"}, "task.width=64", True),
        ({"optimizer.betas": "[0.9,0.99],[0.8,0.9]"}, "optimizer.betas=[0.7,0.9]", True),
    ],
)
def test_what_a_grid_takes_for_values(drawn, space, typed, needed):
    record = replace(SweepRecord.read(drawn), kind="grid", space=space)
    assert needs_record(record, [typed]) is needed


def test_a_sweep_is_resumed_alone(drawn, capsys, tmp_path):
    (tmp_path / "other").mkdir()
    assert main(["resume", "sweep", "other", "sweep.num_runs=3"]) == 2
    assert "resume sweep other: expected one sweep, got 2 names; resume each alone" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["seed=3", "~optimizer.lr"])
def test_a_single_value_of_a_key_that_isnt_drawn_is_refused(drawn, capsys, word):
    assert main(["resume", "sweep", "sweep.num_runs=3", word]) == 2
    assert f"{word.partition('=')[0]}" in (err := capsys.readouterr().err)
    assert "would change the existing runs; name the" in err


def test_a_single_value_of_a_key_that_is_drawn_needs_more_runs(drawn, capsys):
    assert main(["resume", "sweep", "optimizer.lr=0.1"]) == 2
    assert "optimizer.lr=choice(0.1): is a new range, but all 2 runs have been drawn; add" in capsys.readouterr().err


def test_no_run_begins_after_the_time_of_the_sweep_and_resume_renews_it(capfd):
    drawn = ["sweep=random", "sweep.num_runs=2", "sweep.time_limit_min=1e-6", "optimizer.lr=1e-3,1e-2", "run_dir=S"]
    assert main(["-m", *TINY, *drawn]) == 4
    over = "the time of the sweep is over (sweep.time_limit_min): 2 runs not started; for as much time again: python"
    assert over in capfd.readouterr().err
    assert not list(Path("S").glob("*/attempts.jsonl"))
    assert main(["resume", "S", "sweep.time_limit_min=60"]) == 0
    assert len(list(Path("S").glob("*/attempts.jsonl"))) == 2


def test_a_run_that_began_continues_after_the_time_of_the_sweep(capfd):
    words = ["optimizer.lr=1e-3,1e-2,1e-1", "run_dir=S", "trainer.max_steps=2"]
    assert main(["-m", *TINY, *words, "trainer.pause_at_step=1", "trainer.eval_every_steps=1"]) == 4
    shutil.rmtree("S/0/attempts")
    Path("S/0/attempts.jsonl").unlink()
    home = RunDirectory.at("S")
    replace(SweepRecord.read(home), deadline=1.0, time_limit_min=1.0).write(home, 0o750)
    capfd.readouterr()
    assert main(["resume", "S/0", "S/1", "S/2", "trainer.pause_at_step=null"]) == 4
    assert "(sweep.time_limit_min): 1 run not started" in capfd.readouterr().err
    ends = [[str(one.reason) for one in Ledger(RunDirectory.at(f"S/{number}")).attempts()] for number in range(3)]
    assert ends == [[], ["paused", "completed"], ["paused", "completed"]]


def test_a_search_with_failed_runs_did_not_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = prepared(tmp_path, 2)
    record = SweepRecord(
        kind="asha",
        space={},
        fixed=[],
        folder=str(tmp_path),
        submitted=0.0,
        command=[],
        num_runs=2,
        min_steps=10,
        reduction_factor=3,
    )
    search = Search(home, record)
    while (begin := search.ask("here:1", max_new_runs=None)) is not None:
        train(search, begin, 0.5, reason=Reason.FAILED)
    template: Any = None  # nothing is submitted
    assert resume_search(SweepResume(home, [], []), record, template) == ExitCode.FAILED
    out = capsys.readouterr().out
    assert "2 runs failed" in out
    assert "complete" not in out
