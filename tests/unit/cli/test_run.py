"""`python -m hpctrain run`: what it prints and refuses, without launching anything."""

import contextlib
import signal

import pytest

from hpctrain import Run
from hpctrain.attempt.outcome import Outcome, record_end
from hpctrain.cli import main, train
from hpctrain.config.compose import ProgramComposer
from hpctrain.config.program import split_command
from hpctrain.errors import ConfigError
from hpctrain.launch.local import rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason


@pytest.mark.parametrize(
    ("arguments", "words", "command"),
    [
        (["a=1", "--", "python", "x.py"], ["a=1"], ["python", "x.py"]),
        (["--", "torchrun", "--", "x"], [], ["torchrun", "--", "x"]),
        (["a=1"], ["a=1"], []),
        (["a=1", "--"], ["a=1"], []),
    ],
)
def test_the_command_follows_the_first_dashes(arguments, words, command):
    assert split_command(arguments) == (words, command)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run"], "error: there is no -- with a command after it; write python -m hpctrain run [KEY=VALUE ...] -- COM"),
        (["run", "nodes=2", "--"], "error: nothing follows --; write python -m hpctrain run [KEY=VALUE ...] -- COM"),
        (["run", "python", "x.py", "--lr", "3"], "write python -m hpctrain run -- python x.py --lr 3"),
        (["run", "nodes=2", "run.py", "--", "--lr", "3"], "write python -m hpctrain run nodes=2 -- run.py --lr 3"),
        (["run", "nodes=2", "python", "--", "x.py"], "-- belongs before python; write python -m hpctrain run nodes=2"),
        (["run", "args.lr", "--", "python", "x.py"], "args.lr has no value; write args.lr=VALUE"),
        (["drill", "run", "python", "x.py"], "write python -m hpctrain drill run -- python x.py"),
        (["run", "--", "python", "-u", "no.py"], "run.command=no.py: there is no such file in this folder; correct"),
        (["run", "cluster=slurm", "--", "bash", "no.sh", "x"], "run.command=no.sh: there is no such file in this"),
        (["drill", "run", "--", "python3", "no.py"], "run.command=no.py: there is no such file in this folder"),
        (["train.py"], "to run a program, write python -m hpctrain run -- python train.py ..."),
        (["cluster=slurm", "--", "python", "x.py"], "write python -m hpctrain run cluster=slurm -- python x.py"),
        (["python", "x.py"], "to run a program, write python -m hpctrain run -- python x.py"),
        (
            ["nodes=1", "x.py"],
            "argument=x.py: is not KEY=VALUE; write x.py=VALUE; to run a program, python -m hpctrain",
        ),
        (["run", "args=3", "--", "true"], "args=3: is a group of keys of your own; set args.NAME=VALUE"),
        (["run", "code=none", "--", "true"], "set code.snapshot=none"),
        (["run", "cluster.node=2", "--", "true"], "cluster.node=2: is not a known key; set nodes=N"),
        (["run", "health.signal=TERM", "--", "true"], "did you mean run.signal?"),
        (["run", "resume.code=now", "--", "true"], "resume.code=now: is not a known key; "),
        (["run", "--cfg", "job", "--", "true"], "--cfg has no value here; leave out job"),
        (
            ["run", "--code=now", "--", "true"],
            "--code=now is not an option here: a new run copies the code as it is now",
        ),
        (["run", "-m", "hydra/sweeper=optuna", "args.x=1,2", "--", "true"], "optuna"),
        (["run", "--wrong", "--", "true"], "--wrong is not an option here: options of the program belong after --"),
        (["run", "--tolerance", "1", "--", "true"], "--tolerance is not an option here"),
    ],
)
def test_a_wrong_use_is_one_line_and_exit_code_2(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_a_sweep_lists_its_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["run", "-m", "cluster=slurm", "cluster.dry_run=true", "args.lr=1,2", "--", "true", "{args.lr}"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --array=0-1" in out
    assert "args.lr=2" in out
    assert list(tmp_path.iterdir()) == []


def test_cfg_prints_the_configuration(capsys):
    assert main(["run", "--cfg", "args.x=1", "--", "true", "{args.x}"]) == 0
    out = capsys.readouterr().out
    assert "  command:\n  - 'true'\n  - '{args.x}'\n" in out
    assert "trainer" not in out


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_a_launcher_started_are_refused_by_one_line_of_rank_zero(rank, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "RANK_ZERO_S", 0.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name, value in rank_variables(rank, 2, 29_500).items():
        monkeypatch.setenv(name, value)
    try:
        code = main(["run", "--", "true"])
    except SystemExit as error:
        code = error.code
    assert code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == (rank == 0)
    if rank == 0:
        assert "type it without torchrun; in a batch script of your own, write python -m hpctrain.supervise" in err
    assert list(tmp_path.iterdir()) == []


def complete(directory):
    attempt = Ledger(directory).claim()
    ExitRecord(rank=0, host="here", reason=Reason.COMPLETED, step=0).write(directory.attempt(attempt))
    record_end(directory, attempt, Outcome.of_attempt(directory, attempt, 1), world_size=1)


@pytest.fixture(scope="module")
def folder_of_completed(tmp_path_factory):
    """A folder with a completed run of a program that has reported nothing; no test changes it."""
    folder = tmp_path_factory.mktemp("completed")
    command = ["true", "{args.lr}"]
    config = ProgramComposer(command).compose_run([f"run_dir={folder}/runs/done", "args.lr=1"])
    typed = ["python", "-m", "hpctrain", "run", "-m", "run_dir=x", "nodes=1", "args.lr=1,2", "--", *command]
    with contextlib.chdir(folder):
        directory = prepare(config, typed, varied={"args.lr": "1"}).directory
    complete(directory)
    return folder


@pytest.fixture
def completed(folder_of_completed, monkeypatch):
    """Types in the folder of the run; returns its name."""
    monkeypatch.chdir(folder_of_completed)
    return "done"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["resume", "done", "trainer.max_steps=3"], "belongs to hpctrain's own training, not to a program's run"),
        (["resume", "done", "task=text"], "belongs to hpctrain's own training, not to a program's run"),
        (["resume", "done", "--", "false"], "run.command=false: a run keeps its command; start another run with"),
        (["resume", "done", "args.lr=2"], "has 1, and the program's results depend on it; choose another run_dir"),
        (["resume", "done", "+args.wd=2"], "args.wd is not in the command"),
        (["fit-batch", "--", "true"], "run.command=true: fit-batch knows the batches of hpctrain's own trainings"),
        (["stacks", "done"], "runs/done is completed, and only a running run has stacks to show"),
        (["sync", "done"], "enables no service; name one: --service wandb or mlflow"),
    ],
)
def test_what_other_commands_cannot_do_with_a_program_is_one_line(completed, words, line, capsys):
    assert main(words) == 2
    assert line in capsys.readouterr().err


def test_a_completed_program_has_nothing_left_to_do_and_says_how_to_run_it_again(completed, capsys):
    assert main(["resume", completed]) == 0
    first, again = capsys.readouterr().out.splitlines()
    assert first.endswith("runs/done: already completed; nothing is left to run, and nothing was changed")
    assert again == "  to run it again, type its command without run_dir, or with another one"
    assert main(["resume", completed, "--code=now"]) == 0
    assert "nothing was changed\n" in capsys.readouterr().out
    assert main(["inspect", completed]) == 0
    assert main(["cancel", completed]) == 0
    assert "nothing to cancel: the run is completed" in capsys.readouterr().out


def test_warnings_of_several_runs_name_those_that_continue_and_no_completed_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    composer = ProgramComposer(["true"])
    for number, key in enumerate(["a", "b", "c"]):
        config = composer.compose_run([f"run_dir={tmp_path}/runs/many/{number}", f"args.{key}=1"])
        directory = prepare(config, ["run"]).directory
        if key == "a":
            complete(directory)
    assert main(["resume", "many", "cluster.dry_run=true"]) == 0
    out, err = capsys.readouterr()
    assert "runs/many/0: already completed\n" in out
    warnings = [line.partition(" is not")[0] for line in err.splitlines()]
    assert warnings == [f"hpctrain: warning: runs/many/{n}: args.{key}" for n, key in ((1, "b"), (2, "c"))]


def test_a_program_has_no_model_to_load(completed):
    run = Run(completed)
    assert (run.state, run.status().at_step, run.checkpoints()) == ("completed", "", [])
    assert run.status().command == "true '{args.lr}'"
    for load in (run.load_model, run.load_task):
        with pytest.raises(ConfigError, match="is the run of a program, not a training of hpctrain's"):
            load()
