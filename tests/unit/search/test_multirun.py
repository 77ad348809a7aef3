"""Whole sweeps on this machine: composed, launched one after another, and reported to the sweeper."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import yaml
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.sweeper import Sweeper

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.errors import ConfigError, ExitCode, RunFailedError
from hpctrain.files import read_json_lines
from hpctrain.launch.launcher import launch_here
from hpctrain.launch.prepare import prepare
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Ledger
from hpctrain.run.manifest import read_varied
from hpctrain.run.sweep_record import SweepRecord
from hpctrain.search.hydra_sweeper import Direction, register_launcher
from hpctrain.search.multirun import multirun
from hpctrain.search.runs import without_hydra_overrides
from hpctrain.search.sweep import Sweep

pytestmark = pytest.mark.usefixtures("as_before")

SHORT = ("model=convnet", "model.width=1", "trainer.max_steps=2", "logger.tensorboard=false")
EVALUATED = "trainer.eval_every_steps=1"
FAILS = "model._target_=torch.nn.Identity"  # which takes any argument, and has nothing to train


def config_of(path):
    return yaml.safe_load((path / "config.yaml").read_text())


def reasons(path):
    return [str(entry.reason) for entry in Ledger(RunDirectory.at(path)).attempts()]


def best_accuracy(path):
    """The best value of the metric by which digits is judged."""
    return max(record["eval/accuracy"] for record in read_json_lines(path / "metrics.jsonl") if "eval/loss" in record)


def numbers(path):
    return sorted(run.name for run in path.iterdir() if run.name.isdecimal())


def test_runs_go_one_after_another_each_with_its_own_configuration(tmp_path, capsys):
    assert main(["-m", "run_dir=sweep", *SHORT, "optimizer.lr=0.1,0.01", "seed=3"]) == 0
    runs = [tmp_path / "sweep" / str(number) for number in range(2)]
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["0", "1", "sweep.json"]
    assert [config_of(path)["optimizer"]["lr"] for path in runs] == [0.1, 0.01]
    assert [config_of(path)["seed"] for path in runs] == [3, 3]
    assert [config_of(path)["run_dir"] for path in runs] == [str(path) for path in runs]
    first, second = (Ledger(RunDirectory.at(path)).attempts()[-1] for path in runs)
    assert (first.reason, second.reason) == ("completed", "completed")
    assert first.end_time <= second.start_time
    out = capsys.readouterr().out
    headings = [f"run {number} of 2: optimizer.lr={lr}\n" for number, lr in ((1, 0.1), (2, 0.01))]
    assert out.index(headings[0]) < out.index(f"run directory {runs[0]}") < out.index(headings[1])
    assert [read_varied(RunDirectory.at(path)) for path in runs] == [{"optimizer.lr": "0.1"}, {"optimizer.lr": "0.01"}]
    log = (runs[1] / "logs" / "rank_0.log").read_text()
    assert re.search(r"^\S+ \S+ varied +optimizer.lr=0.01$", log, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]  # nothing of Hydra's own


def test_without_a_run_directory_a_sweep_gets_one_of_its_own(tmp_path):
    assert main(["-m", *SHORT, "name=mine", "seed=1,2"]) == 0
    (home,) = (tmp_path / "runs" / "mine").iterdir()
    assert [reasons(home / str(number)) for number in range(2)] == [["completed"]] * 2


def test_a_failed_run_decides_the_exit_code_and_stops_no_other(tmp_path, capsys):
    models = "model._target_=hpctrain.models.convnet.ConvNet,torch.nn.Identity"
    assert main(["-m", "run_dir=sweep", *SHORT, models]) == 1
    assert [reasons(tmp_path / "sweep" / str(number)) for number in range(2)] == [["completed"], ["failed"]]
    assert capsys.readouterr().err.count("there is nothing to train") == 1
    assert (tmp_path / "sweep" / "1" / "logs" / "rank_0.log").read_text().count("rank 0 on") == 1


@pytest.fixture
def launcher(tmp_path):
    """The launcher as a sweeper has it."""
    return register_launcher(Composer(), Sweep(RunDirectory.at(tmp_path / "sweep"), ["a", "test"]))()


def test_a_batch_returns_the_best_values_of_the_task_s_metric(launcher, tmp_path):
    jobs = [[*SHORT, EVALUATED, f"optimizer.lr={lr}", "hydra.job.chdir=false"] for lr in (0.1, 0.001)]
    returns = launcher.launch(jobs, initial_job_idx=4)
    assert [one.status for one in returns] == [JobStatus.COMPLETED] * 2
    assert [one.overrides for one in returns] == jobs
    assert [one.return_value for one in returns] == [best_accuracy(tmp_path / "sweep" / name) for name in "01"]
    # the next command of the same sweeper counts from 0 again, and asks for a run that is there
    (again, _) = launcher.launch([jobs[1], [*jobs[1], "seed=1"]], initial_job_idx=0)
    assert again.return_value == returns[1].return_value
    assert numbers(tmp_path / "sweep") == ["0", "1", "2"]
    assert reasons(tmp_path / "sweep" / "1") == ["completed"]


def test_a_failed_run_of_a_batch_raises_when_it_is_asked_for(launcher):
    failed, finished = launcher.launch([[*SHORT, FAILS], [*SHORT]], initial_job_idx=7)
    assert (failed.status, finished.status) == (JobStatus.FAILED, JobStatus.COMPLETED)
    with pytest.raises(
        RunFailedError, match=r"sweep/0 ended with exit code 1; its log: python -m hpctrain logs \S+sweep/0$"
    ):
        _ = failed.return_value


def test_each_run_of_a_batch_is_checked_before_one_starts(tmp_path):
    sweep = Sweep(RunDirectory.at(tmp_path / "sweep"), ["a", "test"])
    launcher = register_launcher(Composer(), sweep, direction=Direction("direction", "maximize", "max"))()
    job = [*SHORT, EVALUATED]
    for words in (["cluster=slurm"], ["cluster.dry_run=true"], ["checkpoint.metric=loss"]):
        with pytest.raises(ConfigError, match=r"cluster\.wait|cluster\.dry_run|hydra\.sweeper\.direction"):
            launcher.launch([[*job, *words]], initial_job_idx=0)
    assert not sweep.home.path.exists()


def test_adding_a_value_to_a_finished_sweep_trains_that_one_alone(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    words = ["-m", "run_dir=sweep", *SHORT]
    assert main([*words, "optimizer.lr=0.1,0.01"]) == 0
    assert main([*words, "optimizer.lr=0.1,0.05,0.01"]) == 0
    assert [config_of(sweep / name)["optimizer"]["lr"] for name in numbers(sweep)] == [0.1, 0.01, 0.05]
    assert [reasons(sweep / name) for name in numbers(sweep)] == [["completed"]] * 3
    out = capsys.readouterr().out
    assert "sweep/0: already completed, at step 2\nsweep/1: already completed, at step 2\nrun 1 of 1: opt" in out
    # a longer training is something left to do; what else differs from the first run is shown as varied
    assert main([*words, "optimizer.lr=0.1", "trainer.max_steps=3"]) == 0
    assert reasons(sweep / "0") == ["completed", "completed"]
    assert main([*words, "optimizer.lr=0.1,0.2", "seed=7"]) == 0
    assert read_varied(RunDirectory.at(sweep / "3")) == {"optimizer.lr": "0.1", "seed": "7"}


def test_the_same_relative_init_from_makes_the_same_run(tmp_path, capsys):
    assert main([*SHORT, "run_dir=first"]) == 0
    words = ["-m", "run_dir=sweep", *SHORT, "init_from=first"]
    assert main([*words, "optimizer.lr=0.1"]) == 0
    assert main([*words, "optimizer.lr=0.1"]) == 0
    assert numbers(tmp_path / "sweep") == ["0"]
    single = [*SHORT, "run_dir=second", "init_from=first"]
    assert main(single) == main(single) == 0
    assert reasons(tmp_path / "sweep" / "0") == reasons(tmp_path / "second") == ["completed"]
    assert capsys.readouterr().out.count("already completed, at step 2") == 2


def test_resume_of_a_sweep_trains_what_is_missing(tmp_path, capsys, monkeypatch):
    ended = iter([ExitCode.FINISHED, ExitCode.INTERRUPTED])
    with monkeypatch.context() as patched:
        # Ctrl-C in the second run
        patched.setattr("hpctrain.search.sweep.launch_here", lambda run: launch_here(run) or next(ended))
        assert main(["-m", "run_dir=sweep", *SHORT, "optimizer.lr=0.1,0.05,0.01"]) == ExitCode.INTERRUPTED
    out, err = capsys.readouterr()
    assert f"stopped; 1 run not started; to resume: python -m hpctrain resume {tmp_path / 'sweep'}\n" in err
    assert not (tmp_path / "sweep" / "2" / "attempts.jsonl").exists()
    running = Ledger(RunDirectory.at(tmp_path / "sweep" / "1"))
    Owner.write(running.directory.attempt(running.claim()))
    assert main(["resume", "sweep"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("sweep/0: already completed, at step 2\nsweep/1: starting: left alone\nrun 1 of 1: optimizer")
    assert [reasons(tmp_path / "sweep" / name) for name in "02"] == [["completed"]] * 2
    assert main(["resume", "sweep/0", "sweep/2", "trainer.max_steps=3"]) == 0
    assert [len(reasons(tmp_path / "sweep" / name)) for name in "02"] == [2, 2]
    assert main(["resume", "sweep/0"]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == f"{tmp_path}/sweep/0: already completed, at step 3"


def test_a_run_that_another_process_begins_meanwhile_is_left_alone(capsys, monkeypatch):
    launched = []

    def launch_and_begin_the_next(run):
        launched.append(run.directory.path.name)
        ledger = Ledger(RunDirectory.at("sweep/1"))
        if not ledger.last_claim():
            Owner.write(ledger.directory.attempt(ledger.claim()))
        return ExitCode.FINISHED

    monkeypatch.setattr("hpctrain.search.sweep.launch_here", launch_and_begin_the_next)
    assert main(["-m", "run_dir=sweep", *SHORT, "optimizer.lr=0.1,0.05,0.01"]) == 0
    assert launched == ["0", "2"]
    assert "sweep/1: starting: left alone\nrun 3 of 3: " in capsys.readouterr().out


@pytest.mark.parametrize("kind", [["sweep=grid"], ["sweep=asha", "sweep.num_runs=3", "sweep.min_steps=1", EVALUATED]])
def test_a_sweep_that_is_cancelled_while_its_runs_are_written_begins_none(kind, capsys, monkeypatch):
    def prepare_and_cancel(*arguments, **options):
        plan = prepare(*arguments, **options)
        assert main(["cancel", "sweep"]) == 0
        return plan

    monkeypatch.setattr("hpctrain.search.sweep.prepare", prepare_and_cancel)
    assert main(["-m", "run_dir=sweep", *SHORT, *kind, "optimizer.lr=0.1,0.05,0.01"]) == ExitCode.CANCELLED
    assert [reasons(f"sweep/{number}") for number in range(3)] == [[], [], []]
    out, err = capsys.readouterr()
    assert out.startswith("sweep: no further run begins\n")
    assert "; to resume: python -m hpctrain resume " in err


def test_a_dry_run_shows_what_varies(capsys, tmp_path):
    words = ["-m", "run_dir=sweep", "optimizer.lr=0.1,0.01", "seed=3", "cluster.dry_run=true"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        f"nothing was launched; 1 process here would train in {tmp_path}/sweep/1 with optimizer.lr=0.01"
    )
    assert main([*words, "cluster=slurm"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "# nothing was submitted; the array would train",
        f"#   {tmp_path}/sweep/0  optimizer.lr=0.1",
        f"#   {tmp_path}/sweep/1  optimizer.lr=0.01",
    ]


def test_hydras_own_overrides_are_not_the_runs():
    mixed = ["seed=1", "hydra.sweep.dir=x", "+hydra.job.name=y", "hydra/launcher=basic", "~hydra.run", "+task.hydra=1"]
    assert without_hydra_overrides(mixed) == ["seed=1", "+task.hydra=1"]


class Halving(Sweeper):
    """Halves the learning rate, one run at a time, `times` times; records the objectives."""

    results: list[float] = []  # noqa: RUF012 - of the one sweep that a test makes

    def __init__(self, times, direction):
        self.times = times

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments):
        for number in range(self.times):
            (result,) = self.launcher.launch([[*arguments, f"optimizer.lr={0.1 / 2**number}"]], initial_job_idx=number)
            self.results.append(result.return_value)


@pytest.fixture
def halving(tmp_path, monkeypatch):
    """The sweeper as one that is installed beside Hydra, and a folder with its configuration."""
    plugins = types.ModuleType("hydra_plugins")
    plugins.__path__ = []  # Hydra looks for modules there, where no plugin is installed
    module = types.ModuleType("hydra_plugins.halving")
    module.Halving = type("Halving", (Halving,), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, "hydra_plugins", sys.modules.get("hydra_plugins", plugins))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Plugins.instance().register(module.Halving)
    folder = tmp_path / "conf" / "hydra" / "sweeper"
    folder.mkdir(parents=True)
    (folder / "halving.yaml").write_text("_target_: hydra_plugins.halving.Halving\ntimes: 2\ndirection: maximize\n")
    Halving.results.clear()
    return str(tmp_path / "conf")


def test_a_sweeper_that_optimises_learns_the_task_s_metric(halving, tmp_path):
    words = ["--config-dir", halving, "-m", "hydra/sweeper=halving", "run_dir=sweep", *SHORT, EVALUATED]
    assert main(words) == 0
    runs = [tmp_path / "sweep" / str(number) for number in range(2)]
    assert [config_of(path)["optimizer"]["lr"] for path in runs] == [0.1, 0.05]
    assert Halving.results == [best_accuracy(path) for path in runs]
    assert [read_varied(RunDirectory.at(path)) for path in runs] == [{"optimizer.lr": "0.1"}, {"optimizer.lr": "0.05"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["hydra.sweeper.direction=minimize"],
            "hydra.sweeper.direction=minimize: looks for lower values, but higher values of the runs' metric",
        ),
        (
            ["checkpoint.metric=loss"],
            "hydra.sweeper.direction=maximize: looks for higher values, but lower values of the runs' metric are",
        ),
        (
            ["hydra.sweeper.direction=[minimize,maximize]"],
            "hydra.sweeper.direction=['minimize', 'maximize']: names several objectives",
        ),
        (
            ["cluster=slurm"],
            "cluster.wait=false: the sweeper chooses values by the results of runs, so the command has to wait",
        ),
        (["cluster.dry_run=true"], "cluster.dry_run=true: can't preview a sweeper"),
    ],
)
def test_a_sweeper_that_can_t_learn_is_refused_in_one_line(halving, tmp_path, capsys, words, message):
    assert main(["--config-dir", halving, "-m", "hydra/sweeper=halving", "run_dir=sweep", *SHORT, *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"hpctrain: error: {message}")
    assert not (tmp_path / "sweep").exists()


def test_a_failure_ends_a_sweep_that_asks_for_losses(halving, tmp_path, capsys):
    words = ["--config-dir", halving, "-m", "hydra/sweeper=halving", "run_dir=sweep", *SHORT, FAILS]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert re.search(
        r"^hpctrain: error: the sweep ended: \S*sweep/0 ended with exit code 1; its log: ", err, re.MULTILINE
    )
    assert [path.name for path in Path("sweep").iterdir() if path.name.isdecimal()] == ["0"]


def test_the_command_of_a_sweep_is_recorded(tmp_path):
    words = ["-m", "run_dir=S", *SHORT, "seed=0,1", "seed=1,2", "optimizer.lr=0.1", "sweep.time_limit_min=90"]
    assert main([*words, "+task.x=1", "cluster.dry_run=true"]) == 2
    assert not (tmp_path / "S").exists()
    assert main(words) == 0
    record = SweepRecord.read(tmp_path / "S")
    assert (record.kind, record.space, record.seed, record.num_runs) == ("grid", {"seed": "1,2"}, None, None)
    assert record.fixed == [*SHORT, "optimizer.lr=0.1"]
    assert (record.folder, record.config_dir, record.program) == (str(tmp_path), None, None)
    assert record.command == ["python", "-m", "hpctrain", *words]
    assert record.deadline - record.submitted == 90 * 60


SEARCH = ("optimizer.lr=tag(log,interval(1e-3,1e-1))", "seed=interval(0,99)", "cluster.dry_run=true")


def test_random_runs_are_drawn_from_the_seed_and_more_of_them_keep_the_first(tmp_path, capsys):
    def dry(*words):
        assert main(["-m", "sweep=random", *words, *SEARCH, "run_dir=S"]) == 0
        return re.findall(r"S/(\d+) with (.*)", capsys.readouterr().out)

    few = dry("sweep.num_runs=2")
    assert dry("sweep.num_runs=3")[:2] == few
    assert [number for number, _ in few] == ["0", "1"]
    assert dry("sweep.num_runs=2", "sweep.seed=1") != few
    assert not (tmp_path / "S").exists()


def test_random_trains_its_runs_and_typed_again_adds_some(tmp_path, capsys):
    words = ["-m", "sweep=random", "run_dir=S", *SHORT, "optimizer=adamw,sgd", "optimizer.lr=0.1,0.01"]
    assert main([*words, "sweep.num_runs=1"]) == 0
    assert main([*words, "sweep.num_runs=9"]) == 0
    out, err = capsys.readouterr()
    assert "the listed values have only 4 combinations: 4 runs, not sweep.num_runs=9\n" in err
    assert "S/0: already completed" in out
    assert numbers(tmp_path / "S") == ["0", "1", "2", "3"]
    assert all(reasons(tmp_path / "S" / number) == ["completed"] for number in "0123")
    assert len({str(read_varied(RunDirectory.at(tmp_path / "S" / number))) for number in "0123"}) == 4
    record = SweepRecord.read(tmp_path / "S")
    assert (record.kind, record.num_runs, record.seed) == ("random", 4, 0)
    assert main([*words, "sweep.seed=1"]) == 2
    err = capsys.readouterr().err
    assert "already has a sweep=random with sweep.seed=0; choose another run_dir, or continue the one" in err
    assert main([*words, "optimizer.lr=0.1,0.2", "sweep.seed=1"]) == 2
    assert "already has a sweep=random of other values; choose another run_dir" in capsys.readouterr().err
    assert (
        main(["-m", "sweep=asha", *words[2:], "sweep.seed=1", "sweep.num_runs=2", EVALUATED, "sweep.min_steps=1"]) == 2
    )
    assert "already has a sweep=random; choose another run_dir" in capsys.readouterr().err


def test_an_interval_of_two_whole_numbers_is_probably_a_mistake(capsys):
    words = ["-m", "sweep=random", "sweep.num_runs=1", "model.dropout=interval(0,1)", "cluster.dry_run=true"]
    assert main(words) == 0
    text = "model.dropout=interval(0,1) draws 0 or 1; for the numbers between them, write interval(0.0,1.0)\n"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lr=interval(0.1,0.2)"], "is a continuous range; add sweep=random"),
        (["sweep=random", "seed=1"], "sweep=random: there is nothing to search"),
        (["sweep=asha", "seed=1,2"], "sweep.min_steps=null: is required"),
        (["sweep=asha", "sweep.min_steps=9", "trainer.max_steps=9", "seed=1,2"], "so no run would pause"),
        (["sweep=asha", "sweep.min_steps=3", "nodes=1,2"], "nodes=1,2: changes what the jobs request"),
        (["sweep=optuna", "optimizer.lr=interval(-1.0,1.0)"], "lr"),
        (["sweep=random", "sweep.num_runs=4", "optimizer.lr=interval(-1,1)"], "optimizer.lr=-1.0: must be a number"),
        (
            ["sweep=asha", "sweep.min_steps=3", "seed=1,2", "trainer.pause_at_step=2"],
            "trainer.pause_at_step=2: conflicts with sweep=asha, which decides where each run pauses",
        ),
        (
            ["sweep=asha", "sweep.min_steps=3", "seed=1,2", "checkpoint.metric=acuracy"],
            "checkpoint.metric=acuracy: is not the task's own metric, and nothing defines whether lower or higher",
        ),
        (["hydra/sweeper=x", "sweep=random", "seed=1,2"], "hydra/sweeper"),
        (["sweep=random", "cluster=local,slurm"], "cluster=local,slurm: can't be swept over"),
    ],
)
def test_a_search_that_cannot_work_is_refused_in_one_line(words, message, tmp_path, capsys):
    assert main(["-m", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("search", [["sweep=asha", "sweep.min_steps=3"], ["sweep=optuna"]])
def test_a_search_over_a_task_without_evaluations_is_refused(search, tmp_path, capsys, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "from hpctrain.tasks import Task\n\n\nclass Blind(Task):\n"
    source += "    def train_dataset(self): ...\n\n    def loss(self, model, batch): ...\n"
    (tmp_path / "blind.py").write_text(source)
    assert main(["-m", *search, "task=custom", "task._target_=blind.Blind", "seed=1,2"]) == 2
    assert "but the task blind.Blind has no eval_dataset; define eval_dataset(self)" in capsys.readouterr().err


def test_a_search_of_a_program_is_refused(capsys):
    assert main(["run", "-m", "sweep=asha", "args.x=1,2", "--", "true", "{args.x}"]) == 2
    assert "which programs don't have; use sweep=random" in capsys.readouterr().err
    assert (
        main(["run", "-m", "sweep=random", "sweep.num_runs=1", "args.x=interval(1,2)", "--", "true", "{args.x}"]) == 0
    )


def test_resume_of_a_sweep_lists_failed_runs_and_runs_them_again_only_on_request(tmp_path, capsys):
    assert main(["-m", "run_dir=S", "model=convnet", "trainer.max_steps=2", FAILS, "seed=0,1"]) == 1
    capsys.readouterr()
    assert main(["resume", "S"]) == 1
    out = capsys.readouterr().out
    assert "S/0: failed, at step 0; to run it again, add --retry-failed\nS/1: failed" in out
    assert [reasons(tmp_path / "S" / number) for number in "01"] == [["failed"], ["failed"]]
    assert main(["resume", "S/0", "S/1"]) == 1
    assert main(["resume", "S", "--retry-failed"]) == 1
    assert [len(reasons(tmp_path / "S" / number)) for number in "01"] == [3, 3]


def test_a_sweep_may_choose_what_an_experiment_leaves_open(tmp_path, capsys):
    experiment = tmp_path / "conf" / "experiment" / "any_task.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\ndefaults:\n  - override /optimizer: ???\n")
    assert main(["-m", "cluster=slurm", "cluster.dry_run=true", "experiment=any_task", "optimizer=sgd,adamw"]) == 0
    assert "optimizer=adamw" in capsys.readouterr().out


def test_a_sweeper_that_has_the_name_of_hydras_own_is_none_of_its(tmp_path):
    option = tmp_path / "conf" / "hydra" / "sweeper" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: mine.BasicSweeper\n")
    with pytest.raises(ConfigError, match=r"^cluster.dry_run=true: can't preview a sweeper that chooses"):
        multirun(Composer(), ["hydra/sweeper=mine", "cluster.dry_run=true", "seed=1,2"], [])
