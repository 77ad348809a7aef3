from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import time

import pytest

from hpctrain.cli.status import main
from hpctrain.errors import RunDirectoryError
from hpctrain.files import write_json
from hpctrain.metrics.sink import JsonLinesSink
from hpctrain.run.checkpoint_manifest import MANIFEST
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import EndFacts, Ledger, StartFacts
from hpctrain.run.reason import Reason
from hpctrain.run.saves import record_save
from hpctrain.run.times import PhaseTimes
from tests.unit.fakes import manifest

NOW = time.time()


@pytest.fixture(autouse=True)
def clock_stands_still(monkeypatch):
    """Ages are shown in minutes; in a long suite, minutes pass between the import of this file and its tests."""
    monkeypatch.setattr(time, "time", lambda: NOW + 0.5)


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    age_s = iter(range(10_000))

    def make(name, *, job_id=None):
        """Each run is older than the one before."""
        directory = RunDirectory.at(f"runs/{name}")
        directory.create(0o750)
        directory.config.write_text("name: digits\ntrainer: {max_steps: 460}\n")
        when = NOW - 60 * next(age_s)
        os.utime(directory.config, (when, when))
        if job_id is not None:
            JobRecords(directory).add({"job_id": job_id, "time": when, "log": None})
        return directory

    return make


def begin(directory, *, began=NOW - 900, step=0, job_id=None, pid=None, import_s=None, **facts):
    ledger = Ledger(directory, clock=lambda: began)
    number = ledger.claim()
    if pid is not None:
        owner = json.dumps({"host": socket.gethostname(), "pid": pid})
        (directory.attempt(number) / "owner.json").write_text(owner)
    times = PhaseTimes(import_s=import_s)
    ledger.start(number, StartFacts(**facts), times, job_id=job_id, nodes=["n1", "n2"], world_size=4, step=step)


def end(directory, reason, step, *, ended=NOW - 600, detail="", saved_step=None, **times):
    ledger = Ledger(directory, clock=lambda: ended)
    write_json(directory.attempt(ledger.last_claim()) / "times.json", times)
    ledger.end(ledger.last_claim(), EndFacts(saved_step=saved_step), reason=reason, step=step, detail=detail)


def log(directory, step, when=NOW - 300, **values):
    sink = JsonLinesSink(directory.metrics, 10**9, clock=lambda: when)
    sink.log(step, {name.replace("_", "/"): value for name, value in values.items()})
    sink.close()


def shown(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def test_no_runs_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert shown(capsys) == ["no runs under runs/; `python -m hpctrain` starts one"]
    assert shown(capsys, "--json") == ["[]"]


def test_the_table_shows_the_newest_first(make_run, capsys):
    running, failed = make_run("digits/b"), make_run("sweep/0")
    begin(running, pid=os.getpid())
    log(running, 120, train_loss=0.12345)
    means = {"eval/loss": 0.25, "eval/f1": 0.5}
    EvaluationRecord(step=80, means=means, best=Score("f1", "max", 0.75), best_step=40).write(running.attempt(1))
    begin(failed)
    end(failed, Reason.FAILED, 7, detail="rank 3 on n2 failed")
    lines = [re.split(r"  +", line) for line in shown(capsys)]
    assert lines == [
        ["RUN", "STATE", "STEP", "LOSS", "EVAL LOSS", "BEST", "ATTEMPTS", "JOB", "LAST"],
        ["digits/b", "running", "120/460", "0.1235", "0.25", "f1 0.75", "1", "-", "5 min ago"],
        ["sweep/0", "failed", "7/460", "-", "-", "-", "1", "-", "10 min ago", "rank 3 on n2 failed"],
    ]


def test_the_runs_of_a_sweep_show_what_varies(make_run, capsys):
    for number, varied in enumerate(({"optimizer.lr": "1e-3", "seed": "1"}, {"optimizer.lr": "3e-4", "seed": "1"}, {})):
        make_run(f"sweep/{number}").manifest.write_text(json.dumps({"varied": varied}))
    assert [re.split(r"  +", line)[:2] for line in shown(capsys)] == [
        ["RUN", "VARIED"],
        ["sweep/0", "optimizer.lr=1e-3 seed=1"],
        ["sweep/1", "optimizer.lr=3e-4 seed=1"],
        ["sweep/2", "-"],
    ]
    assert shown(capsys, "sweep/1")[1] == "varied      optimizer.lr=3e-4 seed=1"
    assert json.loads("\n".join(shown(capsys, "sweep/1", "--json")))["varied"] == {"optimizer.lr": "3e-4", "seed": "1"}


def test_only_the_newest_are_shown_unless_all_are_asked_for(make_run, capsys):
    for number in range(25):
        make_run(f"digits/{number:02d}")
    lines = shown(capsys)
    assert len(lines) == 1 + 20 + 1
    assert lines[1].startswith("digits/00")
    assert lines[-1] == "5 older runs: --all shows them"
    assert len(shown(capsys, "--all")) == 1 + 25
    assert len(shown(capsys, "digits")) == 1 + 25


def test_another_folder_of_runs(make_run, capsys, tmp_path, monkeypatch):
    make_run("digits/a")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert shown(capsys, "--runs-dir", "../runs")[1].startswith("digits/a ")
    assert shown(capsys, "../runs/digits/a")[0] == "run         ../runs/digits/a"


def test_one_run_in_detail(make_run, capsys):
    directory = make_run("digits/a")
    JobRecords(directory).add({"job_id": "12", "time": NOW - 4500, "log": None})
    begin(directory, began=NOW - 3000, job_id="12", launched=NOW - 3010, import_s=10)
    spent = {"first_step_s": 1, "train_s": 530, "eval_s": 40, "save_s": 29, "last_step": 150}
    end(directory, Reason.PREEMPTED, 150, ended=NOW - 2400, detail="by a job of a higher priority", **spent)
    begin(directory, began=NOW - 900, step=140, pid=os.getpid(), job_id="12", launched=NOW - 930, import_s=25)
    kept = {"import_s": 25, "first_step_s": 5, "train_s": 280, "last_step": 200, "seen": NOW - 300}
    (directory.attempt(2) / "times.json").write_text(json.dumps(kept))
    directory.checkpoint(140).mkdir()
    (directory.checkpoint(140) / MANIFEST).write_bytes(manifest(140))
    directory.checkpoint(180).mkdir()  # not complete
    (directory.checkpoints / "damaged-step_00000160-0123abcd").mkdir()
    log(directory, 200, train_loss=0.5, train_lr=0.001)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "DATE TIME", "\n".join(shown(capsys, "digits")))
    assert text == (
        "run         runs/digits/a\n"
        "state       running\n"
        "step        200 of 460, about 20 min left\n"
        "checkpoint  step 140\n"
        "set aside   damaged-step_00000160-0123abcd: damaged, skipped by a resume\n"
        "metrics     train/loss 0.5  train/lr 0.001  (5 min ago)\n"
        "jobs        12\n"
        "attempts\n"
        "     BEGAN                STEPS              LOST  QUEUED  START  RANKS       JOB  END\n"
        "  1  DATE TIME  0 -> 150             10  25 min   11 s  4 on n1 n2  12   "
        "preempted after 10 min: by a job of a higher priority\n"
        "  2  DATE TIME  140 -> 200 so far     -  24 min   30 s  4 on n1 n2  12   running for 15 min\n"
        "time        queued 66%  training 31%  starting 1%  lost 1%  evaluating 1%  saving 1%  of 75 min; "
        "effective training time ratio 0.32\n"
        "next\n"
        "  python -m hpctrain logs runs/digits/a --follow\n"
        "  python -m hpctrain cancel runs/digits/a"
    )


@pytest.mark.parametrize(
    ("reason", "commands"),
    [
        (Reason.COMPLETED, ["inspect 'runs/it''s'", "logs 'runs/it''s'"]),
        (Reason.INTERRUPTED, ["logs 'runs/it''s'", "resume 'runs/it''s'"]),
        (Reason.FAILED, ["logs 'runs/it''s' --rank 3", "resume 'runs/it''s'"]),
    ],
)
def test_what_to_type_next_fits_the_state_and_the_shell(make_run, capsys, reason, commands):
    directory = make_run("it's")
    begin(directory)
    for rank, blames_peer in ((0, True), (3, False)):
        record = ExitRecord(rank=rank, host="n2", reason=Reason.FAILED, step=7, blames_peer=blames_peer)
        if reason is Reason.FAILED:
            record.write(directory.attempt(1))
    end(directory, reason, 7)
    lines = shown(capsys, "it's")
    typed = [line.replace("'\"'\"'", "''") for line in lines[lines.index("next") + 1 :]]
    assert typed == [f"  python -m hpctrain {command}" for command in commands]


def test_from_which_attempt_on_a_run_is_not_exact(make_run, capsys):
    directory = make_run("digits/a")
    begin(directory, resumed_world_size=8)
    end(directory, Reason.COMPLETED, 7)
    (line,) = [line for line in shown(capsys, "digits") if line.startswith("not exact")]
    assert line == (
        "not exact   from attempt 1 on: 4 ranks resumed from a checkpoint of 8; the samples of each step are the same"
    )


def train_with(directory, *versions):
    """An attempt for each version of torch; each saves five steps."""
    for number, version in enumerate(versions):
        begin(directory, step=5 * number, torch=version)
        end(directory, Reason.PREEMPTED, 5 * number + 5, saved_step=5 * number + 5)


def test_which_attempts_had_which_torch(make_run, capsys):
    directory = make_run("digits/a")
    train_with(directory, "2.13.0", "2.13.0", "2.14.0", None)
    text = (
        "torch 2.13.0 in attempts 1, 2; torch 2.14.0 in attempt 3: the weights may differ from those of a run with one "
        "version"
    )
    assert [line for line in shown(capsys, "digits") if line.startswith("not exact")] == [f"not exact   {text}"]
    assert main(["digits/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_exact"] == [text]
    begin(directory, torch="2.15.0")
    end(directory, Reason.COMPLETED, 5, saved_step=5)
    assert "not exact" not in "".join(shown(capsys, "digits"))  # it began anew


def test_a_run_with_one_torch_is_exact(make_run, capsys):
    train_with(make_run("digits/a"), "2.13.0", None, "2.13.0")
    assert not [line for line in shown(capsys, "digits") if line.startswith("not exact")]


def test_an_attempt_that_saved_nothing_leaves_the_run_exact(make_run, capsys):
    directory = make_run("digits/a")
    train_with(directory, "2.13.0")
    begin(directory, step=5, resumed_world_size=8, torch="2.14.0")
    end(directory, Reason.NODE_FAILURE, 9, saved_step=5)
    assert not [line for line in shown(capsys, "digits") if line.startswith("not exact")]


def test_an_attempt_that_recorded_no_end(make_run, capsys):
    directory = make_run("digits/a")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        begin(directory, pid=process.pid)
    lines = shown(capsys, "digits")
    gone = f"process {process.pid} on {socket.gethostname()} is gone and recorded no end"
    assert lines[1] == f"state       interrupted: {gone}: it was killed, or it crashed"
    assert re.fullmatch(r"  1  \S+ \S+  0 -> \?  4 on n1 n2  no end was recorded", lines[6])


def test_the_queue_is_asked_once_for_all_runs(make_run, slurm, capsys):
    for number in range(3):
        make_run(f"sweep/{number}", job_id=f"12_{number}")
    slurm.queue(
        j12_0={"State": "PENDING", "Reason": "Resources"},
        j12_1={"State": "RUNNING", "Reason": "None"},
        j12_2={"State": "FAILED"},
    )
    lines = shown(capsys)
    assert [line.split()[1] for line in lines[1:]] == ["queued", "starting", "failed"]
    assert lines[3].endswith("job 12_2 ended as FAILED, and no attempt began")
    assert slurm.questions == ["12_0,12_1,12_2"]


def test_a_held_run_shows_what_releases_it(make_run, slurm, capsys):
    make_run("sweep/3", job_id="12_3")
    slurm.queue(j12_3={"State": "PENDING", "Reason": "launch failed requeued held", "PriorityLong": "0"})
    (line,) = shown(capsys)[1:]
    assert re.split(r"  +", line)[1] == "held"
    assert line.endswith("look at its log; type `scontrol release 12_3` (launch failed requeued held)")
    assert shown(capsys, "sweep/3")[1].startswith("state       held: SLURM couldn't start it")


def test_a_queued_run_shows_why_it_waits_and_until_when(make_run, slurm, capsys):
    directory = make_run("digits/a", job_id="12")
    (directory.checkpoints / "damaged-step_000000100-0123abcd").mkdir(parents=True)
    slurm.queue(j12={"State": "PENDING", "Reason": "Priority", "StartTime": str(int(NOW) + 3600)})
    lines = shown(capsys, "digits")
    assert lines[1].startswith("state       queued: ")
    assert len(lines[1]) > len("state       queued: ") + 10
    assert re.fullmatch(r"may start   \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, in (60|59) min, by SLURM's estimate", lines[2])
    assert "jobs        12" in lines
    assert main(["digits", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["state"], record["job_ids"], record["may_start"]) == ("queued", ["12"], int(NOW) + 3600)
    assert record["note"]


@pytest.mark.usefixtures("no_slurm")
def test_without_slurm_the_run_directory_shows_what_it_has(make_run, capsys):
    done, begun = make_run("done", job_id="11"), make_run("begun", job_id="12")
    begin(done, job_id="11")
    end(done, Reason.COMPLETED, 460)
    begin(begun, job_id="12")
    lines = shown(capsys)
    assert lines[1].split()[:2] == ["done", "completed"]
    assert lines[2].split()[:2] == ["begun", "unknown"]
    assert lines[2].endswith("SLURM can't be reached from here")


def test_a_controller_that_does_not_answer_is_no_error(make_run, slurm, capsys):
    make_run("digits/a", job_id="12")
    slurm.fall_silent("squeue")
    assert shown(capsys, "digits")[1] == "state       unknown: SLURM can't be reached from here"


def test_json_of_one_run_is_an_object(make_run, capsys):
    directory = make_run("digits/a")
    begin(directory, began=1000.0, job_id=None, launched=990.0)
    end(directory, Reason.COMPLETED, 460, ended=2000.0, first_step_s=10.0, train_s=980.0, save_s=20.0)
    log(directory, 460, when=1990.0, train_loss=math.nan, eval_accuracy=0.75)
    directory.checkpoint(460).mkdir()
    (directory.checkpoint(460) / MANIFEST).write_bytes(manifest(460))
    spent = dict.fromkeys(["queued_s", "evaluating_s", "lost_s", "stopping_s"], 0.0)
    spent |= {"starting_s": 10.0, "training_s": 980.0, "saving_s": 20.0}
    assert main(["digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "name": "digits",
        "path": str(directory.path),
        "state": "completed",
        "note": "",
        "command": "",
        "step": 460,
        "total_steps": 460,
        "metrics": {"eval/accuracy": 0.75, "train/loss": None},
        "metrics_time": 1990.0,
        "best": None,
        "best_step": None,
        "best_warning": "",
        "varied": {},
        "checkpoint_step": 460,
        "saved_path": None,
        "gone_step": None,
        "set_aside": [],
        "not_exact": [],
        "attempts": [
            {
                "attempt": 1,
                "job_id": None,
                "nodes": ["n1", "n2"],
                "world_size": 4,
                "start_step": 0,
                "start_time": 1000.0,
                "reason": "completed",
                "end_step": 460,
                "end_time": 2000.0,
                "detail": "",
                "extra": {"launched": 990.0, "first_step_s": 10.0, "train_s": 980.0, "save_s": 20.0},
            }
        ],
        "account": {
            "attempts": [{"attempt": 1, "spent": spent, "steps": 460, "steps_lost": 0}],
            "spent": spent,
            "steps_lost": 0,
            "wall_s": 1010.0,
            "ratio": 980 / 1010,
            "shares": {name.removesuffix("_s"): value / 1010 for name, value in spent.items()},
        },
        "verdict": None,
        "job_ids": [],
        "may_start": None,
        "unstarted": False,
        "job_that_may_run": None,
    }


def test_json_of_several_runs_is_a_list(make_run, capsys):
    for name in ("sweep/0", "sweep/1"):
        make_run(name)
    for arguments in (["--json"], ["sweep", "--json"], ["sweep/0", "sweep/1", "--json"]):
        assert main(arguments) == 0
        printed = capsys.readouterr().out
        assert [record["path"][-7:] for record in json.loads(printed)] == ["sweep/0", "sweep/1"]
        assert len(printed.splitlines()) == 2


def test_a_path_without_a_run_is_an_error(make_run):
    with pytest.raises(RunDirectoryError, match="absent: no such path"):
        main(["absent"])


def test_help_shows_examples_and_states(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert "python -m hpctrain status runs/" in text
    assert "interrupted" in text


@pytest.fixture
def make_program(make_run):
    def make(name):
        directory = make_run(name)
        directory.config.write_text("name: long\nargs: {lr: 0.1}\nrun: {command: [python, train.py, 'a b']}\n")
        return directory

    return make


def test_a_program_that_reports_nothing_has_no_step(make_program, capsys):
    directory = make_program("long/a")
    begin(directory, job_id=None)
    end(directory, Reason.TIME_LIMIT, 0, detail="stopped")
    lines = shown(capsys, "long")
    assert lines[1] == "command     python train.py 'a b'"
    (line,) = [line for line in lines if line.startswith("step ")]
    assert line.startswith("step        -  (whether it makes progress can't be seen; `python -m hpctrain run --help`")
    assert not [line for line in lines if "effective training time ratio" in line]
    assert "checkpoint  none yet" in lines
    (directory.checkpoints / "ckpt_1").mkdir()
    (directory.checkpoints / "ckpt_1" / "model.pt").write_text("")
    (directory.checkpoints / "older.pt").write_text("")
    os.utime(directory.checkpoints / "older.pt", (1000, 1000))
    (line,) = [line for line in shown(capsys, "long") if line.startswith("checkpoint ")]
    assert re.fullmatch(r"checkpoint  not reported; newest in checkpoints/: ckpt_1, \d s ago", line)
    assert "STEPS" not in "\n".join(lines)
    (row,) = shown(capsys)[1:]
    assert row.split()[:3] == ["long/a", "interrupted", "-"]


def test_a_completed_program_is_not_said_to_be_out_of_sight(make_program, capsys):
    directory = make_program("long/a")
    directory.config.write_text("run: {command: [bash, -c, 'a\n\n  b']}\n")
    begin(directory, job_id=None)
    assert "checkpoint  none yet" in shown(capsys, "long")
    end(directory, Reason.COMPLETED, 0)
    lines = shown(capsys, "long")
    assert lines[1] == "command     bash -c 'a\\nb'"
    assert {"step        -", "checkpoint  none"} <= set(lines)


def test_a_program_that_reports_has_steps_a_save_and_the_time_left(make_program, capsys):
    directory = make_program("long/a")
    begin(directory, step=100, pid=os.getpid(), job_id=None, launched=NOW - 930, total_steps=1000)
    times = {"import_s": 25, "first_step_s": 5, "train_s": 280, "last_step": 300, "seen": NOW}
    (directory.attempt(1) / "times.json").write_text(json.dumps(times))
    (directory.checkpoints / "two.pt").touch()
    for step, name in ((200, "two.pt"), (300, "three.pt")):
        record_save(directory, 1, step, directory.checkpoints / name)
    lines = shown(capsys, "long")
    assert "step        300 of 1000, about 16 min left" in lines
    assert "checkpoint  step 200: runs/long/a/checkpoints/two.pt" in lines  # the other one is gone
    assert main(["long", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["checkpoint_step"]) == (300, 200)
    assert record["saved_path"] == str(directory.checkpoints / "two.pt")


def test_a_program_that_reports_no_saves_is_not_said_to_lose_its_steps(make_program, capsys):
    directory = make_program("long/a")
    for began, step in ((NOW - 900, 50), (NOW - 500, 90)):
        begin(directory, began=began, job_id=None)
        end(directory, Reason.TIME_LIMIT, step, ended=began + 300, first_step_s=1, train_s=290, last_step=step)
    lines = shown(capsys, "long")
    assert "LOST" not in "\n".join(lines)
    assert [re.search(r"\S+ -> \S+", line)[0] for line in lines if "->" in line] == ["? -> 50", "? -> 90"]
