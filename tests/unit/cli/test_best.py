"""`best` over trained runs, and its export: the experiment trains the same configuration."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys

import pytest

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.config.root import flat
from hpctrain.config.stored import load
from hpctrain.run.config_change import change_config, keep_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.sweep_record import SweepRecord

pytestmark = pytest.mark.usefixtures("no_slurm")
SHORT = ["trainer.max_steps=3", "trainer.eval_every_steps=2", "model=mlp", "model.width=8"]


def nightly(*overrides):
    return pytest.param(list(overrides), marks=pytest.mark.nightly)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(tmp_path, name, overrides, accuracy=0.5, command=None):
    """A run that completed, without the time that training takes."""
    from hpctrain.launch.prepare import prepare

    varied = dict(one.split("=") for one in overrides)
    config = Composer().compose([*SHORT, *overrides, f"run_dir={tmp_path}/runs/{name}"])
    words = command or ["python", "-m", "hpctrain", "-m", *SHORT, *(f"{key}=1,2" for key in varied)]
    directory = prepare(config, words, varied, report=lambda line: None).directory
    ledger = Ledger(directory)
    ledger.claim()
    ledger.start(1, job_id=None, nodes=["here"], world_size=1, step=0)
    best = Score("accuracy", "max", accuracy)
    EvaluationRecord(step=3, means={"eval/accuracy": accuracy}, best=best, best_step=2).write(directory.attempt(1))
    ledger.end(1, reason=Reason.COMPLETED, step=3)
    return directory


def shown(capsys, *words):
    assert main(["best", *words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    assert main(["best", *words]) == 2
    return capsys.readouterr().err


def same_as(winner: RunDirectory, words) -> list[str]:
    """The keys in which an experiment's configuration differs from a run's."""
    stored, composed = flat(load(winner.config)), flat(Composer().compose(words))
    return sorted(key for key in stored.keys() | composed.keys() if stored.get(key) != composed.get(key))


@pytest.mark.nightly
def test_trained_runs(tmp_path, capsys):
    assert main(["-m", *SHORT, "optimizer=adamw,sgd", "seed=0,1", "run_dir=runs/pair"]) == 0
    capsys.readouterr()
    title, head, first, second = shown(capsys, "pair").splitlines()
    assert title == "by eval/accuracy, higher is better"
    assert head.split()[:5] == ["RANK", "optimizer", "seed", "BEST", "STD"]
    assert [line.split()[0] for line in (first, second)] == ["1", "2"]
    assert first.split()[2] == second.split()[2] == "0,1"
    report = json.loads(shown(capsys, "pair", "--metric", "train/loss", "--json"))
    assert (report["metric"], report["mode"], report["keys"]) == ("train/loss", "min", ["optimizer", "seed"])
    assert report["rows"][0]["best"] <= report["rows"][1]["best"]
    assert [run["seed"] for run in report["rows"][0]["runs"]] == [0, 1]
    rows = list(csv.DictReader(io.StringIO(shown(capsys, "pair", "--csv"))))
    assert [(row["rank"], row["seed"], row["num_runs"], row["step"]) for row in rows] == [
        ("1", "0 1", "2", "3"),
        ("2", "0 1", "2", "3"),
    ]
    best = RunDirectory.at(rows[0]["runs"].split(";")[0])
    written = shown(capsys, "pair", "--export", "conf/experiment/best.yaml")
    assert written.splitlines()[-1] == "  python -m hpctrain experiment=best"
    assert same_as(best, ["experiment=best"]) == ["run_dir"]
    text = (tmp_path / "conf/experiment/best.yaml").read_text()
    assert "seed" not in text.partition("defaults:")[2]
    assert f"override /optimizer: {rows[0]['optimizer']}" in text


@pytest.mark.parametrize(
    "overrides",
    [
        nightly("optimizer=sgd", "optimizer.lr=0.05", "seed=3"),
        nightly("schedule=wsd", "schedule.decay_steps=2", "precision=bf16"),
        ["task.held_out=0.3", "callbacks=[early_stopping]", "trainer.clip_grad_norm=1.0", "name=mine"],
        nightly("task=text", "model.num_layers=1", "optimizer.betas=[0.9,0.95]", "data.shuffle=false"),
        ["experiment=quick", "optimizer=sgd", "optimizer.weight_decay=1e-05"],
    ],
)
def test_an_export_has_the_same_configuration(tmp_path, capsys, overrides):
    words = ["python", "-m", "hpctrain", *overrides]
    config = Composer().compose([*overrides, f"run_dir={tmp_path}/runs/one"])
    from hpctrain.launch.prepare import prepare

    winner = prepare(config, words, report=lambda line: None).directory
    winner.metrics.write_text('{"step": 2, "loss": 0.5}\n')
    Ledger(winner).claim()
    Ledger(winner).end(1, reason=Reason.COMPLETED, step=2)
    shown(capsys, "runs", "--metric", "loss", "--export", "conf/experiment/sub/best.yaml")
    assert same_as(winner, ["experiment=sub/best"]) == ["run_dir"]
    assert sorted(path.name for path in (tmp_path / "conf/experiment/sub").iterdir()) == ["best.yaml"]


def test_what_the_resume_changed_and_the_site_kept(tmp_path, capsys):
    command = (
        f"python -m hpctrain -m {shlex.join(SHORT)} nodes=2 cluster=slurm cluster.max_parallel_runs=3 optimizer.lr=1,2"
    )
    winner = prepare(tmp_path, "a/0", ["optimizer.lr=1"], command=shlex.split(command))
    winner.config.write_text(winner.config.read_text().replace("  lr: 1.0\n", "  lr: 0.25\n"))
    prepare(tmp_path, "a/1", ["optimizer.lr=2"], accuracy=0.25)
    assert [row["values"] for row in json.loads(shown(capsys, "a", "--json"))["rows"]] == [
        {"optimizer.lr": 0.25},
        {"optimizer.lr": 2.0},
    ]
    written = shown(capsys, "a", "--export", "conf/experiment/best.yaml").splitlines()
    assert written[-1] == "  python -m hpctrain experiment=best nodes=2 cluster=slurm"
    assert same_as(winner, ["experiment=best"]) == ["run_dir"]


def test_an_export_has_what_was_varied_or_typed_whatever_the_defaults_are_later(tmp_path, capsys):
    (tmp_path / "conf/optimizer").mkdir(parents=True)
    (tmp_path / "conf/experiment").mkdir()
    own = tmp_path / "conf/optimizer/own.yaml"
    own.write_text("_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\n")
    for name, decay in (("plain", "null"), ("averaged", 0.9)):
        text = f"# @package _global_\ntrainer:\n  ema_decay: {decay}\n"
        (tmp_path / f"conf/experiment/{name}.yaml").write_text(text)
    words = ["data.drop_last=true", "experiment=plain,averaged", "optimizer=own,sgd", "optimizer.lr=0.1,0.2"]
    command = ["python", "-m", "hpctrain", "-m", *SHORT, *words]
    overrides = ["data.drop_last=true", "experiment=plain", "optimizer=own", "optimizer.lr=0.1"]
    winner = prepare(tmp_path, "a/0", overrides, command=command)
    overrides[1:3] = ["experiment=averaged", "optimizer=sgd"]
    prepare(tmp_path, "a/1", overrides, accuracy=0.25, command=command)
    shown(capsys, "a", "--export", "conf/experiment/best.yaml")
    own.write_text("_target_: torch.optim.SGD\nlr: 0.7\nmomentum: 0.2\n")
    assert same_as(winner, ["experiment=best"]) == ["run_dir"]
    text = (tmp_path / "conf/experiment/best.yaml").read_text()
    assert "ema_decay: null" in text
    assert "drop_last: true" in text


def test_a_winner_that_a_resume_added_or_changed(tmp_path, capsys):
    command = ["python", "-m", "hpctrain", "resume", "a", "seed=2"]
    winner = prepare(tmp_path, "a/0", ["seed=2", "optimizer=sgd"], command=command)
    fixed = [*SHORT, "optimizer=sgd"]
    SweepRecord(kind="grid", space={"seed": "1,2"}, fixed=fixed, folder=str(tmp_path), submitted=0.0, command=[]).write(
        RunDirectory.at(tmp_path / "runs/a"), 0o750
    )
    shown(capsys, "a", "--export", "conf/experiment/best.yaml")
    assert same_as(winner, ["experiment=best"]) == ["run_dir"]
    change_config(winner, winner.config.read_text().replace("lr: 0.1\n", "lr: 0.2\n"))
    keep_config(winner, 2)
    error = refused(capsys, "a", "--export", "conf/experiment/best.yaml", "--force")
    assert "can't have optimizer.lr=0.1 until step 2, then 0.2 of" in error


def test_a_file_is_replaced_only_by_force(tmp_path, capsys):
    prepare(tmp_path, "a/0", ["seed=1"])
    target = tmp_path / "conf/experiment/best.yaml"
    target.parent.mkdir(parents=True)
    target.write_text("mine")
    assert "exists; choose another name, or add --force" in refused(capsys, "a", "--export", str(target))
    assert target.read_text() == "mine"
    shown(capsys, "a", "--export", str(target), "--force")
    assert "seed: 1" in target.read_text()
    # there without existing, as a file that another command makes meanwhile
    target.unlink()
    target.symlink_to("nowhere")
    assert "exists; choose another name, or add --force" in refused(capsys, "a", "--export", str(target))
    assert target.is_symlink()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("best.yaml", "is not FOLDER/experiment/NAME.yaml"),
        ("conf/experiment/best.json", "is not FOLDER/experiment/NAME.yaml"),
        ("conf/experiment/quick.yaml", "hpctrain has an experiment quick, which is found first"),
    ],
)
def test_a_file_that_would_not_be_found(tmp_path, capsys, path, problem):
    prepare(tmp_path, "a/0", ["seed=1"])
    error = refused(capsys, "a", "--export", path)
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / path).exists()


def test_another_folder_is_named_by_the_command(tmp_path, capsys):
    prepare(tmp_path, "a/0", ["seed=1"])
    written = shown(capsys, "a", "--export", "shared/experiment/best.yaml").splitlines()
    assert written[-1] == "  python -m hpctrain --config-dir shared experiment=best"


def test_a_programs_winner(tmp_path, capsys):
    from hpctrain.config.compose import ProgramComposer
    from hpctrain.launch.prepare import prepare

    words = ["python", "-m", "hpctrain", "run", "args.lr=0.5", "--", sys.executable, "train.py", "{args.lr}"]
    config = ProgramComposer(words[6:]).compose_run(["args.lr=0.5", f"run_dir={tmp_path}/runs/one"])
    run = prepare(config, words, {"args.lr": "0.5"}, report=lambda line: None).directory
    run.metrics.write_text('{"step": 2, "error": 0.5}\n')
    Ledger(run).claim()
    Ledger(run).end(1, reason=Reason.COMPLETED, step=2)
    assert "a program's run has no metric of its own" in refused(capsys, "runs")
    written = shown(capsys, "runs", "--metric", "error", "--mode", "min", "--export", "conf/experiment/p.yaml")
    assert (
        written.splitlines()[-1] == f"  python -m hpctrain run experiment=p -- {sys.executable} train.py '{{args.lr}}'"
    )
    assert ProgramComposer(words[6:]).compose_run(["experiment=p"]).args == {"lr": 0.5}


def test_a_run_whose_command_is_not_known(tmp_path, capsys):
    prepare(tmp_path, "a/0", ["seed=1"], command=["python", "my_sweep.py"])
    error = refused(capsys, "a", "--export", "conf/experiment/best.yaml")
    assert "can't express the configuration of" in error
    assert "my_sweep.py" in error
    assert error.count("\n") == 1
    assert list((tmp_path / "conf/experiment").iterdir()) == []


def test_top_and_odd_folders(tmp_path, capsys):
    for number, accuracy in enumerate([0.5, 0.75, 0.625]):
        prepare(tmp_path, f"a/{number}", [f"optimizer.lr={number + 1}"], accuracy)
    lines = shown(capsys, "a/0", "a", "--top", "1").splitlines()
    assert lines[2].split()[:3] == ["1", "2.0", "0.75"]
    assert lines[3] == "2 more rows: leave out --top to see all"
    single = shown(capsys, "a/1").splitlines()
    assert single[1].split()[:2] == ["RANK", "BEST"]
    (tmp_path / "runs" / "empty").mkdir()
    assert "it contains no run" in refused(capsys, "runs/empty")
    assert "expected a whole number" in refused_by_parser(capsys, "a", "--top", "0")
    assert "not allowed with argument" in refused_by_parser(capsys, "a", "--csv", "--json")


def refused_by_parser(capsys, *words):
    with pytest.raises(SystemExit, match="2"):
        main(["best", *words])
    return capsys.readouterr().err


def test_values_that_json_lacks_are_text(tmp_path, capsys):
    for number, text in enumerate((".nan", "2026-01-31")):
        run = prepare(tmp_path, f"a/{number}", ["optimizer.lr=1"], accuracy=0.25 * number)
        run.config.write_text(run.config.read_text().replace("  lr: 1.0\n", f"  lr: {text}\n"))
    rows = json.loads(shown(capsys, "a", "--json"), parse_constant=pytest.fail)["rows"]
    assert [row["values"] for row in rows] == [{"optimizer.lr": "2026-01-31"}, {"optimizer.lr": "NaN"}]
