"""One run on a real SLURM: from the command to ranks on several nodes and back to its exit code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpctrain.launch.local import free_port, rank_variables

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox
    from tests.support.fork_server import ForkServer

    Done = subprocess.CompletedProcess[str]

HPCTRAIN = [sys.executable, "-m", "hpctrain"]
QUICK = ["logger.tensorboard=false", "cluster.cpus_per_process=1"]
OWN = ["task=custom", "model=convnet"]
ENDLESS = ["trainer.max_steps=1000000", "trainer.max_epochs=null"]

TASKS = """
import json, os, signal, time
from pathlib import Path

import torch

from hpctrain.tasks.digits import Digits

RANK = os.environ.get("SLURM_PROCID")


class RaisesOnRankOne(Digits):
    def loss(self, model, batch):
        if RANK == "1":
            raise ValueError("this sample can't be read")
        return super().loss(model, batch)


class DiesOnRankOne(Digits):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if RANK == "1" and self.calls == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class WaitsAfterThirty(Digits):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        while self.calls > 31 and not Path("go").exists():
            time.sleep(0.1)
        if self.calls > 31 and RANK:
            time.sleep(0.1)  # the ranks agree about once a second
        return super().loss(model, batch)


class Tells(Digits):
    def __init__(self, folder):
        super().__init__()
        printed = {"environ": dict(os.environ), "threads": torch.get_num_threads(), "host": os.uname().nodename}
        Path(folder, f"printed_{RANK}.json").write_text(json.dumps(printed))
        print(f"rank {RANK} is here")
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to type commands in, with a user's own tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(TASKS)
    return tmp_path


@pytest.fixture
def hpctrain(sandbox: SlurmSandbox, work: Path) -> Callable[..., Done]:
    """Type `python -m hpctrain ...` and wait for it."""

    def command(*words: str, env: dict[str, str] | None = None) -> Done:
        return sandbox.run([*HPCTRAIN, *words], cwd=work, env=env, timeout=280)

    return command


@pytest.fixture
def begin(hpctrain: Callable[..., Done]) -> Iterator[Callable[..., Future[Done]]]:
    """Start `python -m hpctrain ...` without waiting for it."""
    with ThreadPoolExecutor() as pool:
        yield lambda *words, **options: pool.submit(hpctrain, *words, **options)


def ledger(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


def job_id(run: Path) -> str:
    record: dict[str, str] = json.loads((run / "jobs.jsonl").read_text().splitlines()[0])
    return record["job_id"]


def wait_until(ready: Callable[[], object], timeout: float = 200) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, f"not so after {timeout:g} s"
        time.sleep(0.1)


@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_nodes_train_what_as_many_processes_here_do(
    sandbox: SlurmSandbox,
    begin: Callable[..., Future[Done]],
    hpctrain: Callable[..., Done],
    fork_server: ForkServer,
    work: Path,
    nodes: int,
) -> None:
    words = ["trainer.max_steps=40", "checkpoint.keep_best=0", *QUICK]
    submitted = begin("cluster=slurm", f"nodes={nodes}", "cluster.wait=true", "run_dir=R", *words)
    port = free_port()
    local = [
        fork_server.start("hpctrain.cli:main", [f"run_dir={work}/L", *words], **rank_variables(rank, nodes, port))
        for rank in range(nodes)
    ]
    done = submitted.result()
    assert done.returncode == 0, done.stdout + done.stderr

    job = job_id(work / "R")
    printed = done.stdout
    assert printed.startswith(f"submitted job {job}\nrun directory {work}/R\n  python -m hpctrain status {work}/R\n")
    running, ended = printed.index("the run is running on n1"), printed.index("completed at step 40")
    assert running < printed.index("step 10/40") < printed.index("step 40/40  eval/accuracy") < ended
    assert "\x1b" not in printed, "plain lines in a log"

    start, end = ledger(work / "R")
    assert start.items() >= {"event": "start", "attempt": 1, "job_id": job, "world_size": nodes, "step": 0}.items()
    assert start["nodes"] == sandbox.nodes[:nodes]
    assert end.items() >= {"event": "end", "attempt": 1, "reason": "completed", "step": 40}.items()
    assert sandbox.job(job)["JobState"] == "COMPLETED"

    for rank in fork_server.wait(*local):
        assert rank.code == 0, rank.output
    here, there = (json.loads(hpctrain("inspect", name, "--json").stdout) for name in ("L", "R"))
    assert (there["step"], there["samples_seen"], there["world_size"]) == (40, here["samples_seen"], nodes)
    assert [(saved["step"], saved["intact"]) for saved in there["checkpoints"]] == [(40, True)]
    assert there["weights_digest"] == here["weights_digest"]


@pytest.mark.nightly  # the gate has a refusal of every rank, and errors without SLURM
@pytest.mark.sandbox("--accounting")
def test_an_error_of_one_rank_reaches_every_place(
    sandbox: SlurmSandbox, hpctrain: Callable[..., Done], work: Path
) -> None:
    task = [*OWN, "task._target_=own.RaisesOnRankOne"]
    done = hpctrain("cluster=slurm", "nodes=2", "cluster.wait=true", "run_dir=R", *task, *QUICK)
    assert done.returncode == 1, done.stdout + done.stderr
    blame = done.stdout[done.stdout.index("failed at step 0") :]
    assert "rank 1 on n2, after step " in blame
    assert 'own.py", line' in blame, "the traceback shows where"
    assert "ValueError: this sample can't be read" in blame
    assert f"python -m hpctrain resume {work}/R" in blame

    start, end = ledger(work / "R")
    assert (start["job_id"], start["nodes"]) == (job_id(work / "R"), ["n1", "n2"])
    assert (end["reason"], end["step"]) == ("failed", 0)
    assert "rank 1 on n2" in end["detail"]
    job = sandbox.job(job_id(work / "R"))
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "1:0")
    sacct = ["sacct", "-nXP", f"--jobs={job['JobId']}", "--format=State,ExitCode"]
    wait_until(lambda: sandbox.run(sacct).stdout == "FAILED|1:0\n", timeout=60)
    status = json.loads(hpctrain("status", "R", "--json").stdout)
    assert (status["state"], status["attempts"][0]["reason"]) == ("failed", "failed")


@pytest.mark.nightly
def test_a_killed_rank_and_a_cancelled_run_side_by_side(
    sandbox: SlurmSandbox, begin: Callable[..., Future[Done]], hpctrain: Callable[..., Done], work: Path
) -> None:
    """On one node."""
    here = ["cluster=slurm", "cluster.processes_per_node=2", "+cluster.sbatch.nodelist=n1", "cluster.wait=true", *QUICK]
    beside = begin(*here, "run_dir=cancelled", *ENDLESS)
    task = [*OWN, "task._target_=own.DiesOnRankOne", "cluster.requeue.max_failures=0"]
    done = hpctrain(*here, "run_dir=killed", *task)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rank 1 of 2 ended without an exit record" in done.stdout
    assert "Traceback" not in done.stdout, "the rank that only lost it is not to blame"
    start, end = ledger(work / "killed")
    assert (start["nodes"], start["world_size"], end["reason"]) == (["n1"], 2, "infrastructure")
    assert sandbox.job(job_id(work / "killed"))["JobState"] == "FAILED"

    job = job_id(work / "cancelled")
    wait_until((work / "cancelled" / "metrics.jsonl").exists)
    assert hpctrain("cancel", "cancelled").stdout == f"cancelled: cancelled job {job}, which was running\n"
    done = beside.result()
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"python -m hpctrain resume {work}/cancelled" in done.stdout
    assert sandbox.job(job)["JobState"] == "CANCELLED"
    start, end = ledger(work / "cancelled")
    assert (start["nodes"], start["world_size"], end["reason"]) == (["n1"], 2, "cancelled")
    saved = json.loads(hpctrain("inspect", "cancelled", "--json").stdout)
    assert saved["step"] == end["step"] > 0, "saved before it ended"


def test_what_is_asked_for_reaches_slurm_and_the_ranks(
    sandbox: SlurmSandbox, begin: Callable[..., Future[Done]], hpctrain: Callable[..., Done], work: Path
) -> None:
    features = ["activefeatures=big", "availablefeatures=big"]
    sandbox.ask("scontrol", "update", "nodename=n1,n2,n3", *features)
    commands = Path(str(shutil.which("srun"))).parent  # export=NONE leads to the installed SLURM
    asked = [
        "cluster.network_interface=eth0",
        "name=everything",
        "cluster.processes_per_node=2",
        "cluster.cpus_per_process=2",
        "cluster.memory_gb=1.5",
        "cluster.time_limit_min=7",
        "cluster.constraint=big",
        "cluster.exclude=n1",
        "cluster.signal=USR1",
        "cluster.signal_delay_s=33",
        "+cluster.sbatch.comment=two words",
        "+cluster.sbatch.export=NONE",
        "+cluster.env.COLOUR='light green'",
        f"cluster.setup=['export FROM_SETUP=$(hostname)','echo setup was here','export PATH={commands}:$PATH']",
        "cluster.srun_args=['--label']",
    ]
    task = [*OWN, "task._target_=own.Tells", f"+task.folder={work}", "logger.tensorboard=false"]
    words = ["cluster=slurm", "cluster.wait=true", "trainer.max_steps=3"]
    done = begin(*words, "nodes=2", "run_dir=R", *asked, *task)
    # this machine's torch is built without CUDA, and the sandbox's GPUs are files of another kind
    without = begin(*words, "run_dir=on gpu", "cluster.gpus_per_node=2", *QUICK)
    shown = ["--", "sh", "-c", "echo GPUs $CUDA_VISIBLE_DEVICES"]
    program = begin("run", *words[:2], "run_dir=program", "cluster.gpus_per_node=2", *shown)
    misspelt = begin(*words, "run_dir=misspelt", "cluster.srun_args=['--no-such-option']")
    assert done.result().returncode == 0, done.result().stdout + done.result().stderr

    job = sandbox.job(job_id(work / "R"))
    assert job["JobName"] == "everything"
    assert (job["NodeList"], job["ExcNodeList"], job["Features"]) == ("n[2-3]", "n1", "big")
    assert (job["NumTasks"], job["CPUs/Task"], job["MinMemoryNode"]) == ("4", "2", "1.50G")
    assert (job["TimeLimit"], job["Comment"].strip()) == ("00:07:00", "two words")
    ranks = [json.loads((work / f"printed_{rank}.json").read_text()) for rank in range(4)]
    assert [rank["host"] for rank in ranks] == ["n2", "n2", "n3", "n3"]
    assert [rank["threads"] for rank in ranks] == [2] * 4
    environs = [rank["environ"] for rank in ranks]
    expected = {
        "SLURM_CPUS_PER_TASK": "2",
        "GLOO_SOCKET_IFNAME": "eth0",
        "COLOUR": "light green",
        "FROM_SETUP": "n2",
    }
    assert [{name: environ.get(name) for name in expected} for environ in environs] == [expected] * 4
    assert "setup was here" in (work / "R" / "logs" / f"batch_{job['JobId']}.log").read_text()
    assert "#SBATCH --signal=USR1@33" in next((work / "R" / "logs" / "submitit").glob("*.sh")).read_text()
    assert "3: rank 3 is here\n" in hpctrain("logs", "R", "--rank", "3").stdout
    assert re.search(r"^0: \S+ \S+ step 3/3 ", done.result().stdout, re.MULTILINE), (
        "srun's label, and a line as in a log"
    )

    failed = without.result()
    assert failed.returncode == 1, failed.stdout + failed.stderr
    refusal = r"rank \d on n\d: cluster\.gpus_per_node=2: torch \S+ on n\d is built without CUDA; install a build"
    assert re.search(refusal, failed.stdout)
    assert sandbox.job(job_id(work / "on gpu"))["TresPerNode"] in {"gres:gpu:2", "gres/gpu:2"}
    assert program.result().returncode == 0, program.result().stdout + program.result().stderr
    assert "\nGPUs 0,1\n" in hpctrain("logs", "program", "--rank", "1").stdout
    resume = f"python -m hpctrain resume '{work}/on gpu'"
    assert f"once the cause is fixed, resume with: {resume} --code=now\n" in failed.stdout
    refused = misspelt.result()
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "unrecognized option '--no-such-option'" in refused.stdout


@pytest.mark.nightly
def test_from_inside_an_allocation(sandbox: SlurmSandbox, work: Path) -> None:
    train = " ".join([*HPCTRAIN, *QUICK, "trainer.max_steps=3"])
    (work / "job.sh").write_text(f"""#!/bin/bash
        export SBATCH_PARTITION=high SBATCH_TIMELIMIT=3 SRUN_NTASKS=7 SLURM_NTASKS=7 SLURM_CPUS_PER_TASK=5
        {train} cluster=slurm cluster.wait=true run_dir=submitted > submitted.out 2>&1 &
        (
            unset SRUN_NTASKS SLURM_NTASKS SLURM_CPUS_PER_TASK
            srun --ntasks=2 {train} > ranks.out 2>&1
            echo "ranks: exit code $?"
            srun --ntasks=2 {train} nodes=0 2>&1 | grep '^hpctrain:'
            echo "mistake: exit code ${{PIPESTATUS[0]}}"
            srun --ntasks=2 {train} run_dir=/proc/R 2>&1 | grep -Ei 'hpctrain: |rank'
            echo "run directory: exit code ${{PIPESTATUS[0]}}"
        )
        wait %1
        echo "submitted: exit code $?"
    """)
    job = sandbox.run(["sbatch", "--wait", "--nodes=2", "--ntasks=2", "--output=out", "job.sh"], cwd=work, timeout=280)
    assert job.returncode == 0, job.stderr
    job_id_outside = job.stdout.split()[-1]
    for ended in (job_id_outside, job_id(work / "submitted")):
        sandbox.wait_job(ended, "COMPLETED")  # for a moment longer, SLURM may be completing it
    cannot = "run_dir=/proc/R: can't be created (No such file or directory); choose a folder that you may write to"
    assert (work / "out").read_text().splitlines() == [
        "ranks: exit code 0",
        "hpctrain: error: nodes=0: must be at least 1; set nodes=1 or more",
        "mistake: exit code 2",
        f"hpctrain: rank 0 on n1: {cannot}",
        "run directory: exit code 2",
        "submitted: exit code 0",
    ], "rank zero reports a mistake once"

    inner = sandbox.job(job_id(work / "submitted"))
    assert inner["JobId"] != job_id_outside
    # the partition is one of the defaults that hpctrain takes from such variables, and the others are for another job
    assert (inner["Partition"], inner["TimeLimit"], inner["NumTasks"]) == ("high", "01:00:00", "1")
    start, end = ledger(work / "submitted")
    assert (start["job_id"], start["world_size"], end["reason"]) == (inner["JobId"], 1, "completed")

    (made,) = (work / "runs" / "digits").iterdir()
    assert made.name == f"job_{job_id_outside}", "srun's ranks submit nothing, and the job names their run"
    start, end = ledger(made)
    assert (start["job_id"], start["nodes"], start["world_size"]) == (job_id_outside, ["n1", "n2"], 2)
    assert end["reason"] == "completed"
    assert "step 3/3" in (work / "ranks.out").read_text()
    assert sandbox.ask("squeue", "--noheader") == ""


def test_a_shell_on_a_terminal_inside_an_allocation_submits(sandbox: SlurmSandbox, work: Path) -> None:
    train = " ".join([*HPCTRAIN, "cluster=slurm", "run_dir=R", "+cluster.sbatch.begin=now+1hour"])
    terminal = f"srun --nodes=2 --ntasks=4 --pty bash -c '[ $SLURM_PROCID != 0 ] || {train}'"
    done = sandbox.run(["script", "--quiet", "--return", "--command", terminal, "/dev/null"], cwd=work)
    assert done.returncode == 0, done.stdout
    assert f"submitted job {job_id(work / 'R')}" in done.stdout
    assert sandbox.job(job_id(work / "R"))["Reason"] == "BeginTime"


def test_a_refusal_of_sbatch_is_one_line_and_leaves_nothing(hpctrain: Callable[..., Done], work: Path) -> None:
    before = sorted(work.iterdir())
    for words in (["run_dir=R"], ["-m", "run_dir=R", "optimizer.lr=1e-3,1e-4"]):
        done = hpctrain(*words, "cluster=slurm", "cluster.partition=nowhere")
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert "invalid partition specified: nowhere" in line
        assert sorted(work.iterdir()) == before


@pytest.mark.nightly
@pytest.mark.sandbox("--node-timeout=10")
def test_a_requeued_job_and_one_whose_node_died_end_as_a_straight_run_does(
    sandbox: SlurmSandbox, begin: Callable[..., Future[Done]], hpctrain: Callable[..., Done], work: Path
) -> None:
    task = [*OWN, "task._target_=own.WaitsAfterThirty"]
    words = ["trainer.max_steps=60", "checkpoint.every_steps=10", *task, *QUICK]
    submit = ["cluster=slurm", "nodes=2", *words]
    alone = ["cluster.exclude='n[3-4]'", "+cluster.sbatch.exclusive=true"]
    requeued = begin(*submit, *alone, "run_dir=requeued", "cluster.wait=true")
    wait_until((work / "requeued" / "jobs.jsonl").exists)
    done = hpctrain(*submit, "run_dir=moved")
    moved = job_id(work / "moved")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"submitted job {moved}"), "it doesn't wait"
    straight = begin("cluster.processes_per_node=2", "run_dir=straight", *words)
    for name in ("requeued", "moved"):
        wait_until((work / name / "checkpoints" / "step_00000030" / "manifest.json").exists)

    assert sandbox.job(moved)["NodeList"] == "n[3-4]"
    sandbox.kill_node("n4")
    sandbox.requeue(job_id(work / "requeued"))
    wait_until(lambda: "DUE TO JOB REQUEUE" in (work / "requeued" / "logs" / "rank_0.log").read_text())
    (work / "go").touch()
    sandbox.wait_requeued(job_id(work / "requeued"))

    def waits_or_goes_on() -> bool:
        status = json.loads(hpctrain("status", "requeued", "--json").stdout)
        waits = status["state"] == "queued" and "BeginTime" in status["note"]
        return waits or status["state"] in {"starting", "running"}  # a busy machine may be late to ask

    wait_until(waits_or_goes_on, timeout=60)
    done = requeued.result()
    assert done.returncode == 0, done.stdout + done.stderr
    sandbox.wait_job(moved, "COMPLETED", timeout=200)

    for name, job in (("requeued", job_id(work / "requeued")), ("moved", moved)):
        first, first_end, second, second_end = sorted(ledger(work / name), key=lambda record: record["attempt"])
        assert (first["job_id"], second["job_id"], second["restart_count"]) == (job, job, 1)
        assert (first["step"], second_end["reason"], second_end["step"]) == (0, "completed", 60)
        assert second["step"] == first_end["saved_step"] >= 30
    assert first_end["reason"] == "node_failure"
    assert "n4" not in second["nodes"]
    assert straight.result().returncode == 0, straight.result().stderr
    names = ("straight", "requeued", "moved")
    digests = [json.loads(hpctrain("inspect", name, "--json").stdout)["weights_digest"] for name in names]
    assert digests == digests[:1] * 3
