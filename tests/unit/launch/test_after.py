from __future__ import annotations

import pytest
import yaml

from hpctrain.cli import main
from hpctrain.config.resources import resources_of
from hpctrain.config.stored import load_run
from hpctrain.launch.prepare import RunPlan
from hpctrain.launch.submission import submit
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from tests.unit.runs_before import end_attempt, run_before

SHORT = ["model=convnet", "model.width=1", "trainer.max_steps=1", "logger.tensorboard=false"]
SUBMIT = [*SHORT, "cluster=slurm"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return place


def refused(capsys, *words):
    """The line with which a command is refused."""
    assert main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def stored(path):
    return yaml.safe_load((path / "config.yaml").read_text())


def test_names_are_stored_as_paths_and_their_jobs_are_waited_for(slurm, folder):
    one = run_before(folder / "runs" / "pre" / "1", job_id="20")
    two = run_before(folder / "elsewhere")
    slurm.queue(j20={"State": "RUNNING"})
    assert main([*SUBMIT, "run_dir=R", "after=pre/1,elsewhere"]) == 0
    assert stored(folder / "R")["after"] == [str(one.path), str(two.path)]
    assert "#SBATCH --dependency=afterany:20\n" in slurm.submitted
    assert "--begin" not in slurm.submitted


def test_a_run_without_a_job_is_looked_at_later(slurm, folder):
    run_before(folder / "local")
    assert main([*SUBMIT, "run_dir=R", "after=local"]) == 0
    assert "#SBATCH --begin=now+300\n" in slurm.submitted


def test_after_completed_runs_a_job_starts_as_any_other(slurm, folder):
    run_before(folder / "done", "completed", job_id="20")
    assert main([*SUBMIT, "run_dir=R", "after=done"]) == 0
    assert "--dependency" not in slurm.submitted
    assert "--begin" not in slurm.submitted


def test_a_program_waits_as_well(slurm, folder):
    run_before(folder / "a", job_id="20")
    slurm.queue(j20={"State": "PENDING"})
    assert main(["run", "cluster=slurm", "run_dir=R", "after=a", "--", "true"]) == 0
    assert "#SBATCH --dependency=afterany:20\n" in slurm.submitted


def test_all_runs_of_a_sweep_wait_for_all_runs_of_another(slurm, folder):
    for number in (10, 2):
        run_before(folder / "runs" / "sweep" / str(number), job_id=f"20_{number}")
    (folder / "runs" / "sweep" / "sweep.json").write_text('{"kind": "grid"}')
    slurm.queue(j20_2={"State": "RUNNING"}, j20_10={"State": "PENDING"})
    assert main(["-m", *SUBMIT, "run_dir=S", "after=sweep", "seed=1,2"]) == 0
    expected = [str(folder / "runs" / "sweep" / str(number)) for number in (2, 10)]
    assert [stored(folder / "S" / str(number))["after"] for number in (0, 1)] == [expected] * 2
    assert slurm.submitted.count("#SBATCH --dependency=afterany:20_2:20_10\n") == 1


def test_several_runs_without_brackets_are_one_value_in_a_sweep(slurm, folder):
    for name in ("a", "b"):
        run_before(folder / name)
    assert main(["-m", *SUBMIT, "run_dir=S", "after=a,b", "seed=1,2"]) == 0
    assert sorted(path.name for path in (folder / "S").glob("[0-9]*")) == ["0", "1"]
    assert stored(folder / "S" / "1")["after"] == [str(folder / "a"), str(folder / "b")]


def test_the_users_own_dependency_is_kept(slurm, folder):
    run_before(folder / "a", job_id="20")
    slurm.queue(j20={"State": "RUNNING"})
    own = "+cluster.sbatch.dependency='afterok:3{}4'"
    assert main([*SUBMIT, "run_dir=R", "after=a", own.format(":")]) == 0
    assert "#SBATCH --dependency=afterok:3:4,afterany:20\n" in slurm.submitted
    assert main([*SUBMIT, "run_dir=Q", "after=a", own.format("?afterok:")]) == 0
    assert "#SBATCH --dependency='afterok:3?afterok:4'\n" in slurm.submitted


def test_a_refused_dependency_is_left_out(slurm, folder, capsys):
    run_before(folder / "a", job_id="20")
    slurm.queue(j20={"State": "RUNNING"})
    refusal = "sbatch: error: Batch job submission failed: Job dependency problem"
    taken = f"cat $1 > {slurm.home}/submitted; echo Submitted batch job 8"
    slurm.script("sbatch", f"grep -q -- --dependency $1 && {{ echo '{refusal}' >&2; exit 1; }}\n{taken}")
    assert main([*SUBMIT, "run_dir=R", "after=a"]) == 0
    assert "#SBATCH --begin=now+300\n" in slurm.submitted
    assert "Job dependency problem; submitted without the dependency" in capsys.readouterr().err


def test_what_is_not_a_run_is_refused(slurm, folder, capsys):
    assert "after=nowhere: is not a run" in refused(capsys, *SUBMIT, "run_dir=R", "after=nowhere")
    assert "after=nowhere: is not a run" in refused(capsys, "-m", *SUBMIT, "run_dir=R", "after=nowhere", "seed=1,2")
    assert list(folder.iterdir()) == []
    assert slurm.submitted == ""


def test_runs_that_wait_for_each_other_are_refused(slurm, folder, capsys):
    run_before(folder / "b", after=(str(folder / "a"),))
    run_before(folder / "c", after=(str(folder / "b"),))
    assert main([*SUBMIT, "run_dir=a", "cluster.wait=false"]) == 0
    slurm.queue(j8={"State": "CANCELLED"})
    before = stored(folder / "a")
    assert f"after={folder}/c: waits for this run" in refused(capsys, "resume", "a", "after=c")
    assert f"after={folder}/a: waits for this run" in refused(capsys, "resume", "a", "after=a")
    assert stored(folder / "a") == before


@pytest.mark.parametrize("failure", ["end", "start", "wait"])
def test_a_run_that_would_end_at_once_is_not_submitted(slurm, folder, capsys, failure):
    run_before(folder / "a", "failed", job_id="20")
    words = [*SUBMIT, "run_dir=R", "after=a", f"after_failure={failure}"]
    if failure == "end":
        error = refused(capsys, *words)
        assert f"after={folder}/a: is failed (as the test says)" in error
        assert "resume it first, set after_failure=start to start anyway" in error
        assert not (folder / "R").exists()
    else:
        assert main(words) == 0
        assert ("--begin" in slurm.submitted) == (failure == "wait")


def test_on_this_machine_all_runs_must_have_completed(no_slurm, folder, capsys):
    going, done = run_before(folder / "going"), run_before(folder / "done", "completed")
    words = [*SHORT, "run_dir=R", "after=done,going"]
    assert f"after={going.path}: is prepared" in refused(capsys, *words)
    end_attempt(going, "failed")
    assert "after_failure=start" in refused(capsys, *words)
    assert "resume it first" in refused(capsys, *words, "after_failure=wait")
    assert "resume it first" in refused(capsys, "-m", *words, "seed=1,2")
    assert sorted(path.name for path in folder.iterdir()) == ["done", "going"]
    assert main([*words, "after_failure=start"]) == 0
    assert done.config.exists()


def test_a_resume_can_name_other_runs_or_none(slurm, folder, capsys):
    for name in ("a", "b"):
        run_before(folder / name)
    assert main([*SUBMIT, "run_dir=R", "after=a"]) == 0
    slurm.queue(j8={"State": "CANCELLED"})
    assert main(["resume", "R", "after=a,b"]) == 0
    assert stored(folder / "R")["after"] == [str(folder / "a"), str(folder / "b")]
    slurm.queue(j8={"State": "CANCELLED"})
    assert main(["resume", "R", "after=[]"]) == 0
    assert stored(folder / "R")["after"] == []
    assert RunDirectory.at(folder / "R").config.exists()


def test_the_tasks_of_a_search_are_not_delayed(slurm, folder, capsys):
    run_before(folder / "a")
    words = ["-m", *SUBMIT, "sweep=asha", "sweep.num_runs=2", "trainer.max_steps=4", "trainer.eval_every_steps=1"]
    error = refused(capsys, *words, "optimizer.lr='interval(0.1,1)'", "after=a", "run_dir=S")
    assert "sweep=asha" in error
    assert not (folder / "S").exists()


@pytest.mark.parametrize(
    ("kind", "problem"), [(None, "contains 2 runs, and isn't a sweep"), ("asha", "some runs never complete")]
)
def test_several_runs_that_are_no_sweep_are_refused(slurm, folder, capsys, kind, problem):
    for name in ("1", "2"):
        run_before(folder / "runs" / "many" / name, job_id="20")
    if kind is not None:
        (folder / "runs" / "many" / "sweep.json").write_text(f'{{"kind": "{kind}"}}')
    assert main([*SUBMIT, "run_dir=S", "after=many"]) == 2
    assert problem in capsys.readouterr().err
    assert not (folder / "S").exists()


def test_a_link_is_followed_when_the_command_is_typed(slurm, folder):
    run_before(folder / "runs" / "first", job_id="20")
    (folder / "runs" / "latest").symlink_to("first")
    slurm.queue(j20={"State": "RUNNING"})
    assert main([*SUBMIT, "run_dir=S", "after=latest"]) == 0
    assert str(folder / "runs" / "first") in (folder / "S" / "config.yaml").read_text()


def test_the_users_own_begin_stays(slurm, folder):
    run_before(folder / "runs" / "local")
    assert main([*SUBMIT, "run_dir=S", "after=local", "+cluster.sbatch.begin=now+2hours"]) == 0
    script, *_ = (folder / "S" / "logs" / "submitit").glob("*.sh")
    assert "#SBATCH --begin=now+2hours" in script.read_text()


def test_a_job_that_takes_the_place_of_another_does_not_wait(slurm, folder):
    run_before(folder / "runs" / "first", job_id="20")
    slurm.queue(j20={"State": "RUNNING"})
    assert main([*SUBMIT, "run_dir=R", "after=first"]) == 0
    config = load_run(folder / "R" / "config.yaml")
    directory = RunDirectory.at(folder / "R")
    (job_id,) = submit([RunPlan(config, directory, resources_of(config))], directory, continues=True)
    script = directory.submitit / f"{job_id}_submission.sh"
    assert "dependency" not in script.read_text()
    assert JobRecords(directory).continues(job_id)
