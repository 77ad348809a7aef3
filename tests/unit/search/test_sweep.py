from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.launch.after import require_others
from hpctrain.launch.prepare import plan
from hpctrain.run.ledger import Ledger
from hpctrain.search.sweep import by_resources, require_one_cluster


def test_runs_that_ask_for_the_same_share_an_array(composer):
    runs = [
        plan(composer.compose(["cluster=slurm", f"nodes={nodes}", f"optimizer.lr={lr}"]))
        for nodes in (1, 2)
        for lr in (1e-3, 3e-4)
    ]
    assert by_resources(runs) == [[0, 1], [2, 3]]


def test_other_memory_is_another_array(composer):
    runs = [plan(composer.compose(["cluster=slurm", f"cluster.memory_gb={memory}"])) for memory in (1, 2, 1)]
    assert by_resources(runs) == [[0, 2], [1]]


def test_two_kinds_of_cluster_are_refused(composer):
    with pytest.raises(ConfigError, match="can't be swept over"):
        require_one_cluster([composer.compose([]), composer.compose(["cluster=slurm"])])


def test_resume_skips_the_runs_that_cant_be_read(many, capsys):
    many[0].config.write_text("seed: [")
    many[1].attempts.mkdir()
    assert main(["resume", "many", "cluster.dry_run=true"]) == 2
    out, err = capsys.readouterr()
    assert [line.split(": ")[2] for line in err.splitlines()] == ["many/0", "many/1"]
    assert "many/2" in out
    assert "many/1" not in out


def test_runs_that_were_killed_come_last(many, capsys):
    for run, kills in zip(many, (2, 1, 0), strict=True):
        for _ in range(kills):
            Ledger(run).claim()
    assert main(["resume", "many", "cluster.dry_run=true", "--force"]) == 0
    assert re.findall(r"many/\d", capsys.readouterr().out) == ["many/2", "many/1", "many/0"]


def test_a_change_that_no_run_can_take_is_refused_once(many, capsys):
    many[0].config.write_text("seed: [")
    assert main(["resume", "many", "cluster.dry_run=true", "trainer.absent=1"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("hpctrain: error: trainer.absent")


SEARCH = ("sweep=asha", "sweep.num_runs=5", "sweep.min_steps=2", "trainer.max_steps=8", "trainer.max_epochs=null")
LIMIT = "sbatch: error: QOSMaxSubmitJobPerUserLimit"


def multirun(*words):
    return main(["-m", "cluster=slurm", "run_dir=S", *words])


def jobs_of(folder):
    records = Path(folder, "jobs.jsonl")
    return [json.loads(line)["job_id"] for line in records.read_text().splitlines()] if records.exists() else []


@pytest.fixture
def small_arrays(slurm, tmp_path, monkeypatch):
    """A SLURM whose arrays have at most two tasks, and which takes ten."""
    monkeypatch.chdir(tmp_path)
    slurm.config(MaxArraySize=2)
    slurm.take_jobs(10, LIMIT)
    return slurm


def arrays_in(slurm):
    return re.findall(r"--array=(\S+)", slurm.submitted)


def test_a_sweep_larger_than_an_array_is_several(small_arrays, capsys):
    assert multirun("seed=range(0,5)", "cluster.max_parallel_runs=4") == 0
    assert arrays_in(small_arrays) == ["0-1%2", "0-1%1"]
    assert [jobs_of(f"S/{n}") for n in range(5)] == [["1"], ["2_0"], ["2_1"], ["3_0"], ["3_1"]]
    out = capsys.readouterr().out
    assert out.startswith("submitted job 1\nsubmitted job array 2 with 2 runs\nsubmitted job array 3 with 2 runs\n")
    assert small_arrays.num_config_questions == 1


def test_more_arrays_than_may_run_at_the_same_time_are_announced(small_arrays, capsys):
    assert multirun("seed=range(0,4)", "cluster.max_parallel_runs=1") == 0
    assert arrays_in(small_arrays) == ["0-1%1", "0-1%1"]
    first, _ = capsys.readouterr().out.split("\n", 1)
    assert first == (
        "cluster.max_parallel_runs=1: each of 2 arrays runs one at a time, so up to 2 run at the same time"
    )


def test_a_submit_limit_leaves_the_rest_prepared(small_arrays, capsys):
    small_arrays.take_jobs(1, LIMIT)
    assert multirun("seed=range(0,4)") == 1
    assert [jobs_of(f"S/{n}") for n in range(4)] == [["1_0"], ["1_1"], [], []]
    assert all(Path(f"S/{n}/config.yaml").exists() for n in range(4))
    assert Path("S/sweep.json").exists()
    assert capsys.readouterr().err == (
        "hpctrain: error: 2 of 4 runs could not be submitted: SLURM takes no more of your jobs now: "
        "QOSMaxSubmitJobPerUserLimit; to submit the rest later: python -m hpctrain resume "
        f"{Path.cwd()}/S\n"
    )
    small_arrays.take_jobs(10, LIMIT)
    small_arrays.queue(j1_0={"State": "RUNNING"}, j1_1={"State": "PENDING"})
    assert main(["resume", "S"]) == 0
    assert [jobs_of(f"S/{n}") for n in range(4)] == [["1_0"], ["1_1"], ["2_0"], ["2_1"]]


def test_a_submit_limit_at_the_first_array_writes_nothing(small_arrays, capsys):
    small_arrays.take_jobs(0, LIMIT)
    assert multirun("seed=range(0,4)") == 2
    assert not Path("S").exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_another_refusal_keeps_what_was_submitted(small_arrays, capsys):
    small_arrays.take_jobs(1, "sbatch: error: invalid partition specified: x")
    assert multirun("seed=range(0,4)") == 2
    assert [path.name for path in sorted(Path("S").iterdir()) if path.name != "code"] == [
        "0",
        "1",
        "logs",
        "sweep.json",
    ]
    assert jobs_of("S/0") == ["1_0"]
    cancel = f"to cancel: python -m hpctrain cancel {Path.cwd()}/S"
    assert capsys.readouterr().err.startswith(
        f"2 of 4 runs were submitted before the error; {cancel}\nhpctrain: error: "
    )


def test_waiting_includes_the_runs_that_were_submitted_before(small_arrays, monkeypatch):
    assert multirun("seed=1,2") == 0
    small_arrays.queue(j1_0={"State": "RUNNING"}, j1_1={"State": "PENDING"})
    monkeypatch.setattr("hpctrain.search.sweep.wait_for", lambda run: int(run.path.name))
    assert multirun("seed=1,2", "cluster.wait=true") == 1
    assert len(arrays_in(small_arrays)) == 1


@pytest.mark.parametrize("words", [["cluster=slurm"], ["cluster=local"]])
def test_a_sweep_that_another_command_launches_meanwhile_is_not_launched_again(
    small_arrays, capsys, monkeypatch, words
):
    typed = ["-m", "run_dir=S", "seed=1,2", *words]
    launched = []

    def launch_here(run):
        launched.append(run.directory.path.name)
        return 0

    def require_others_while_another_command_launches(*arguments):
        monkeypatch.setattr("hpctrain.search.sweep.require_others", require_others)
        assert main(typed) == 0
        require_others(*arguments)

    monkeypatch.setattr("hpctrain.search.sweep.launch_here", launch_here)
    monkeypatch.setattr("hpctrain.search.sweep.require_others", require_others_while_another_command_launches)
    assert main(typed) == 2
    assert "S/0: another command has just launched this run; type the command again" in capsys.readouterr().err
    assert (launched, len(arrays_in(small_arrays))) == ((["0", "1"], 0) if "cluster=local" in words else ([], 1))
    assert Path("S/sweep.json").exists()


def test_the_tasks_of_a_search_are_several_arrays(small_arrays, capsys):
    assert multirun(*SEARCH, "optimizer.lr=interval(1e-4,1e-1)", "cluster.max_parallel_runs=3") == 0
    assert jobs_of("S") == ["1", "2_0", "2_1", "3_0", "3_1"]
    assert (
        "submitted job array 3 with 2 tasks; each takes the next run of the search when it starts\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("refusal", [LIMIT, "sbatch: error: invalid partition specified: x"])
def test_a_search_keeps_the_tasks_that_were_submitted(small_arrays, capsys, refusal):
    small_arrays.take_jobs(2, refusal)
    assert multirun(*SEARCH, "optimizer.lr=interval(1e-4,1e-1)") == 1
    assert jobs_of("S") == ["1", "2_0", "2_1"]
    assert all(Path(f"S/{n}/config.yaml").exists() for n in range(5))
    assert "2 of 5 tasks could not be submitted: " in capsys.readouterr().err


def test_a_dry_run_shows_every_array(small_arrays, capsys):
    assert multirun("seed=range(0,4)", "cluster.dry_run=true") == 0
    assert capsys.readouterr().out.count("#SBATCH --array=0-1%2\n") == 2
    assert not Path("S").exists()
