from __future__ import annotations

import pytest

from hpctrain.cli import main
from hpctrain.config.compose import Composer
from hpctrain.config.stored import load
from hpctrain.launch.prepare import prepare
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import may_start_over
from hpctrain.run.job_records import JobRecords
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import EndFacts, Ledger
from hpctrain.run.reason import Reason

SITE = "defaults: [slurm, _self_]\npartition: long\n"
ONE, TWO = ["mine"], ["mine", "other"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return prepare(Composer().compose(["run_dir=mine"]), []).directory


def goes_on(directory):
    """As if this process trained it."""
    ledger = Ledger(directory)
    Owner.write(directory.attempt(ledger.claim()))


@pytest.mark.parametrize("before", [[], ["nodes=2"]])
def test_changes_may_stand_before_and_after_a_flag(run, tmp_path, capsys, before):
    folder = tmp_path / "site" / "cluster"
    folder.mkdir(parents=True)
    (folder / "ours.yaml").write_text(SITE)
    words = [*before, "--config-dir", "site", "cluster=ours", "cluster.dry_run=true"]
    assert main(["resume", str(run.path), *words]) == 0
    assert "#SBATCH --partition=long" in capsys.readouterr().out


def test_a_change_may_be_longer_than_the_name_of_a_file(run, capsys):
    change = f"cluster.setup=[{','.join(['date'] * 100)}]"
    assert main(["resume", str(run.path), change, "cluster=slurm", "cluster.dry_run=true"]) == 0
    assert "date\ndate\n" in capsys.readouterr().out


def test_a_run_that_goes_on_is_refused(run, capsys):
    goes_on(run)
    assert main(["resume", str(run.path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_sweep_leaves_a_run_of_it_that_goes_on_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = ["model=convnet", "model.width=1", "trainer.max_steps=1"]
    running = prepare(Composer().compose(["run_dir=many/0", "optimizer.lr=3e-4", *short]), []).directory
    goes_on(running)
    assert main(["-m", "run_dir=many", "optimizer.lr=1e-3,3e-4", *short]) == 0
    assert capsys.readouterr().out.startswith("many/0: starting: left alone\nrun 1 of 1: optimizer.lr=0.001\n")
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == ["0", "1", "sweep.json"]
    assert Ledger(running).last_claim() == 1


def test_what_can_t_be_resumed_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["trainer.max_steps=3"], ["absent"], ["absent", "trainer.max_steps=3"]):
        assert main(["resume", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def started_job(directory, job_id="12", reason=None):
    """An attempt in a job that was submitted."""
    JobRecords(directory).add({"job_id": job_id, "time": 50.0, "log": None})
    ledger = Ledger(directory, clock=lambda: 100.0)
    number = ledger.claim()
    ledger.start(number, job_id=job_id, nodes=["n1"], world_size=1, step=0)
    if reason is not None:
        ledger.end(number, reason=reason, step=0)


def all_of(directory):
    """Every file and folder of a run, with its content, time and mode."""
    found = {}
    for path in sorted([directory.path, *directory.path.rglob("*")]):
        content = path.read_bytes() if path.is_file() else None
        found[path] = (content, path.stat().st_mode, path.stat().st_mtime_ns if content is not None else None)
    return found


ABSENT, SILENT, GARBAGE = "absent", "silent", "garbage"


@pytest.fixture(params=[ABSENT, SILENT, GARBAGE])
def unreachable(request, slurm, monkeypatch, tmp_path):
    """A machine on which SLURM can't be asked, though sbatch works."""
    if request.param == ABSENT:
        for command in ("squeue", "sacct"):
            (slurm.home / command).unlink()
        monkeypatch.setenv("PATH", str(slurm.home))
    elif request.param == SILENT:
        slurm.fall_silent("squeue")
    else:
        slurm.script("squeue", "echo 'Segmentation fault (core dumped)'")
    return slurm


def test_a_job_that_may_still_run_is_not_doubled(run, unreachable, capsys):
    started_job(run)
    before = all_of(run)
    assert main(["resume", str(run.path), "cluster=slurm", "trainer.max_steps=9"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "job 12 may still be queued or running, and SLURM can't be asked (" in err
    assert err.endswith(f"or insist: `python -m hpctrain resume {run.path} --force`\n")
    assert (unreachable.submitted, all_of(run)) == ("", before)


def test_a_dry_run_needs_no_answer(run, unreachable, capsys):
    started_job(run)
    run.config_before.write_bytes(run.config.read_bytes())
    before = all_of(run)
    assert main(["resume", str(run.path), "cluster=slurm", "cluster.dry_run=true"]) == 0
    assert "#SBATCH" in capsys.readouterr().out
    assert (unreachable.submitted, all_of(run)) == ("", before)


def test_a_user_who_knows_better_can_insist(run, slurm, capsys):
    started_job(run)
    slurm.fall_silent("squeue")
    assert main(["resume", str(run.path), "cluster=slurm", "--force"]) == 0
    assert "submitted job 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sbatch", "code"),
    [
        ("echo 'sbatch: error: invalid partition specified: x' >&2; exit 1", 2),
        ("echo no number", 1),
    ],
)
def test_a_resume_that_sbatch_refuses_leaves_the_run_as_it_was(run, slurm, sbatch, code, capsys):
    started_job(run, reason=Reason.FAILED)
    slurm.script("sbatch", sbatch)
    before = all_of(run)
    assert main(["resume", str(run.path), "cluster=slurm", "trainer.max_steps=9", "run_mode='0700'"]) == code
    assert capsys.readouterr().err.count("\n") == 1
    assert all_of(run) == before


def test_a_resume_of_a_sweep_that_sbatch_refuses_leaves_it_as_it_was(tmp_path, monkeypatch, slurm, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        prepare(Composer().compose([f"run_dir=many/{number}", f"seed={number}"]), [])
    slurm.script("sbatch", "exit 1")
    before = all_of(RunDirectory.at("many"))
    assert main(["resume", "many", "cluster=slurm", "trainer.max_steps=9"]) == 1
    assert all_of(RunDirectory.at("many")) == before


def saved(directory, step=40, reason=Reason.INTERRUPTED):
    """As if an attempt had saved a checkpoint, which is gone."""
    ledger = Ledger(directory)
    number = ledger.claim()
    ledger.start(number, job_id=None, nodes=[], world_size=1, step=0)
    ledger.end(number, EndFacts(saved_step=step), reason=reason, step=step)


def test_a_run_whose_checkpoints_are_gone_is_refused_unless_it_may_start_over(run, slurm, capsys):
    saved(run)
    before = all_of(run)
    assert main(["resume", str(run.path), "cluster=slurm", "trainer.max_steps=90"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), slurm.submitted, all_of(run)) == (1, "", before)
    assert f"{run.checkpoints}: expected the checkpoint of step 40, which the run saved" in err
    slurm.script("sbatch", "exit 1")
    assert main(["resume", str(run.path), "cluster=slurm", "resume.from_scratch=true"]) == 1
    assert all_of(run) == before


@pytest.mark.parametrize("reason", [Reason.INTERRUPTED, Reason.COMPLETED])
def test_a_resume_that_may_start_over_says_so_to_its_attempt_alone(run, slurm, reason):
    saved(run, reason=reason)
    assert main(["resume", str(run.path), "cluster=slurm", "resume.from_scratch=true"]) == 0
    assert may_start_over(run)
    assert not load(run.config).resume.from_scratch


def test_of_a_sweep_only_the_runs_whose_checkpoints_are_gone_are_skipped(tmp_path, monkeypatch, slurm, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [
        prepare(Composer().compose([f"run_dir=many/{number}", f"seed={number}"]), []).directory for number in range(2)
    ]
    saved(runs[1])
    assert main(["resume", "many", "cluster=slurm"]) == 2
    out, err = capsys.readouterr()
    assert "hpctrain: error: many/1: " in err
    assert err.endswith("; skipped\n")
    assert "submitted job" in out
    assert JobRecords(runs[1]).read() == []
    assert main(["resume", "many/1", "cluster=slurm", "resume.from_scratch=true"]) == 0


def test_a_resume_of_a_run_that_never_began_doesnt_remove_it(run, slurm, capsys):
    slurm.script("sbatch", "exit 1")
    before = all_of(run)
    assert main(["resume", str(run.path), "cluster=slurm"]) == 1
    assert all_of(run) == before


def test_a_resume_whose_job_cannot_be_recorded_is_cancelled_and_leaves_the_run_as_it_was(run, slurm, capsys):
    slurm.script("sbatch", f"ln -s /dev/full {run.jobs}; echo Submitted batch job 8")
    before = all_of(run)
    assert main(["resume", str(run.path), "cluster=slurm", "trainer.max_steps=9"]) == 1
    found = capsys.readouterr().err
    assert "job 8 could not be recorded (" in found
    assert "jobs.jsonl: No space left on device; " in found
    assert "and had to be cancelled" in found
    assert (slurm.cancelled, all_of(run)) == (["8"], before)


@pytest.mark.parametrize(
    ("state", "reverted", "words"),
    [
        pytest.param("FAILED", True, ONE, id="failed-one", marks=pytest.mark.nightly),
        pytest.param("FAILED", True, TWO, id="failed-two"),
        pytest.param("CANCELLED", False, ONE, id="cancelled-one"),
        pytest.param("CANCELLED", False, TWO, id="cancelled-two", marks=pytest.mark.nightly),
        pytest.param("COMPLETED", False, ONE, id="completed-one", marks=pytest.mark.nightly),
        pytest.param("COMPLETED", False, TWO, id="completed-two"),
    ],
)
def test_a_change_whose_job_failed_before_an_attempt_is_reverted(run, slurm, capsys, state, reverted, words):
    started_job(run, reason=Reason.FAILED)
    prepare(Composer().compose(["run_dir=other"]), [])
    before = run.config.read_text()
    assert main(["resume", "mine", "cluster=slurm", "cluster.setup=['exit 1']"]) == 0
    slurm.queue(j8={"State": state})
    capsys.readouterr()
    assert main(["resume", *words, "--runs-dir=.", "nodes=1", "cluster=slurm", "cluster.dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert (run.config.read_text() == before) == reverted
    assert (
        "mine: the last resume's job failed before it started an attempt; its changes are undone" in out
    ) == reverted
    assert run.config_before.exists() == (not reverted)


def test_a_completed_run_is_completed_again_after_a_longer_run_whose_job_failed(run, slurm, capsys):
    started_job(run, reason=Reason.COMPLETED)
    assert main(["resume", "mine", "--runs-dir=.", "cluster=slurm", "trainer.max_steps=9"]) == 0
    slurm.queue(j8={"State": "FAILED"})
    assert main(["resume", "mine", "--runs-dir=."]) == 0
    assert "already completed, at step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("detail", "remedy", "change"),
    [
        ("trainer.max_time_min=5: it took 6 min", "trainer.max_time_min=MINUTES", "trainer.max_time_min=9"),
        ("early_stopping: no gain", "'~callbacks.early_stopping'", "callbacks=[early_stopping]"),
    ],
)
def test_a_run_that_ended_early_says_why_and_trains_on_once_that_is_changed(run, slurm, capsys, detail, remedy, change):
    ledger = Ledger(run)
    number = ledger.claim()
    ledger.start(number, job_id=None, nodes=["n1"], world_size=1, step=0)
    ledger.end(number, reason=Reason.COMPLETED, step=4, detail=detail)
    assert main(["resume", "mine", "--runs-dir=."]) == 0
    out = capsys.readouterr().out
    assert f"mine: already completed, at step 4 ({detail})\n" in out
    assert f"/mine {remedy}    # to train further" in out
    assert main(["resume", "mine", "--runs-dir=.", "cluster=slurm", change]) == 0
    assert "submitted job" in capsys.readouterr().out


def test_a_bad_change_leaves_the_run_as_it_was(run, capsys):
    before = all_of(run)
    for words in (["optimizer.lr=x"], ["trainer.micro_batch_size=7"], ["optimizer.lr=0.5"], ["no.such=1"]):
        assert main(["resume", str(run.path), *words]) == 2
    assert all_of(run) == before
