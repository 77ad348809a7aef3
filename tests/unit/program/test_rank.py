"""One rank as a process: its child's environment, its end and its exit record."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from hpctrain.run.code import CodeSnapshot, list_of, record_code, write_files
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.times import read_times

SHOW = """
import json, os, signal
signals = {name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT")}
shown = {"environ": dict(os.environ), "cwd": os.getcwd(), "group": os.getpgrp() == os.getpid(), "signals": signals}
shown["blocked"] = len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
shown["descriptors"] = sorted(os.listdir("/proc/self/fd"))[:4]
shown["stdin"] = os.readlink("/proc/self/fd/0")
open("shown", "w").write(json.dumps(shown))
"""
HOLDS = "trap '' TERM; touch ready; while true; do sleep 0.05; done"
"""Of a shell that ignores SIGTERM."""


def pids_of(word):
    done = subprocess.run(["pgrep", "-f", word], capture_output=True, text=True, check=False)
    return [int(one) for one in done.stdout.split()]


def await_none(word):
    deadline = time.monotonic() + 20
    while (left := pids_of(word)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_what_a_program_finds(program):
    run = program(sys.executable, "-Sc", SHOW, signal="USR2", cluster={"env": {"MINE": "1"}})
    code, record = run.run(HPCTRAIN_DEADLINE="2000000000")
    assert (code, record.reason, record.done, record.stop_signal) == (0, Reason.COMPLETED, False, None)
    shown = json.loads((run.folder / "shown").read_text())
    environ = shown["environ"]
    assert (
        environ.items()
        >= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_PORT": "29123",
            "MINE": "1",
            "HPCTRAIN_RUN_DIR": str(run.directory.path),
            "HPCTRAIN_ATTEMPT": "1",
            "HPCTRAIN_CHECKPOINT_DIR": str(run.directory.checkpoints),
            "HPCTRAIN_SUBMIT_DIR": str(run.folder),
            "HPCTRAIN_STOP_SIGNAL": "USR2",
            "HPCTRAIN_DEADLINE": "2000000000",
        }.items()
    )
    assert (
        not LauncherFacts(attempt=1, logged=True, store="x", parent=1, terminal=1, code="x").variables().keys()
        & environ.keys()
    )
    assert not os.path.exists(environ["HPCTRAIN_SESSION"])  # noqa: PTH110 - removed at the end
    assert (shown["cwd"], shown["group"], shown["blocked"]) == (str(run.folder), True, 0)
    assert shown["stdin"] == os.devnull
    signals = shown["signals"]
    assert signals["SIGUSR1"] == str(signal.SIG_IGN)
    assert signals["SIGUSR2"] == signals["SIGTERM"] == str(signal.SIG_DFL)
    assert signals["SIGINT"] == str(signal.default_int_handler)


def test_the_log_says_what_happened(program):
    run = program("sh", "-c", "echo {args.word} {other}; exit 3", args={"word": "hello"})
    code, record = run.run()
    assert (code, record.reason, record.message) == (1, Reason.FAILED, "exit code 3: hello {other}")
    started, said, ended, *rest = run.log().splitlines()
    assert started.endswith("sh -c 'echo hello {other}; exit 3'")
    assert "hpctrain: attempt 1: starting " in started
    assert said == "hello {other}"
    assert ended.endswith("hpctrain: attempt 1: the program ended: exit code 3")
    assert rest == []


def test_a_traceback_reaches_the_record(program):
    run = program(sys.executable, "-Sc", "print('working')\nraise ValueError('bad')")
    _, record = run.run()
    assert record.message == "exit code 1: ValueError: bad"
    assert record.traceback.splitlines()[0] == "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["no-such-program"], "run.command=no-such-program: no such program in PATH (/bin:/usr/bin)"),
        (["./script"], "run.command=./script: isn't executable"),
        (["./nothing"], "run.command=./nothing: no such program in"),
    ],
)
def test_a_command_that_cant_be_started(program, command, text):
    run = program(*command)
    (run.folder / "script").write_text("true\n")
    code, record = run.run(PATH="/bin:/usr/bin")
    assert (code, record.reason) == (1, Reason.FAILED)
    assert record.message.startswith(text)
    assert record.message in run.log()


def test_rank_zero_records_start_and_times(program):
    run = program("sleep", "0.2")
    run.run()
    (attempt,) = Ledger(run.directory).attempts()
    assert (attempt.world_size, attempt.start_step, attempt.open) == (1, 0, True)
    assert attempt.launched <= attempt.start_time
    times = read_times(run.directory.attempt(1))
    assert times["train_s"] >= 0.1
    assert "first_step_s" not in times


def test_another_rank_records_neither(program):
    run = program("true")
    assert run.start(rank=1, world_size=2).wait(timeout=30) == 0
    assert run.record(1).reason is Reason.COMPLETED
    assert Ledger(run.directory).attempts() == []
    assert read_times(run.directory.attempt(1)) == {}


def test_a_death_by_a_signal_is_the_machines(program):
    run = program("sh", "-c", "echo working; kill -SEGV $$")
    code, record = run.run()
    assert (code, record.reason, record.message) == (1, Reason.INFRASTRUCTURE, "killed by SIGSEGV: working")


def test_what_a_program_leaves_behind_is_killed(program, monkeypatch):
    seconds = f"5432{os.getpid()}"  # other tests of this machine have their own
    run = program("sh", "-c", f"setsid sleep {seconds}1 & sleep {seconds}2 & echo started")
    assert run.run()[1].reason is Reason.COMPLETED
    await_none(f"sleep {seconds}[12]")


def test_a_program_that_signals_its_group_reaches_only_itself(program):
    run = program("sh", "-c", "trap 'exit 0' TERM; kill -TERM 0; exit 5")
    assert run.run()[1].reason is Reason.COMPLETED


def test_the_program_dies_with_the_process_that_watches_it(program):
    # torchrun's workers have sessions of their own, too
    sleep = f"sleep 5432{os.getpid()}3"
    script = f"echo $HPCTRAIN_SESSION > session; {sleep} & setsid {sleep} & setsid -f {sleep}; {sleep}; :"
    run = program("sh", "-c", script)
    process = run.start()
    while len(pids_of(f"^{sleep}")) < 4:
        time.sleep(0.02)
    process.kill()
    process.wait()
    await_none(sleep)
    assert not os.path.exists((run.folder / "session").read_text().strip())  # noqa: PTH110 - the guard removed it


def test_a_superseded_attempt_starts_nothing(program):
    run = program("touch", "started")
    Ledger(run.directory).claim()
    code, record = run.run()
    assert (code, record.reason) == (0, Reason.INTERRUPTED)
    assert "superseded by attempt 2" in record.message
    assert not (run.folder / "started").exists()


def test_a_rank_without_a_launcher_is_refused(program):
    run = program("true")
    process = run.start(HPCTRAIN_CLAIM="")
    assert process.wait(timeout=30) == 1
    assert "no launcher has begun an attempt of it; python -m hpctrain resume" in run.log()


def test_a_rank_that_cant_make_its_session_leaves_a_record(program, tmp_path):
    run = program("true")
    # a name in it may be as long as the one with which tempfile probes it, and no longer
    folder = str(tmp_path)
    while len(folder) < 4076:
        folder += "/" + "x" * max(1, min(200, 4080 - len(folder) - 1))
    os.makedirs(folder)  # noqa: PTH103
    assert run.start(TMPDIR=folder).wait(timeout=30) == 1
    record = run.record()
    assert record.reason is Reason.INFRASTRUCTURE
    assert "the rank's process failed: " in record.message
    assert record.message.endswith("File name too long")


def test_a_process_per_node(program):
    run = program(sys.executable, "-Sc", SHOW, processes="node", cluster={"processes_per_node": 3})
    run.run(OMP_NUM_THREADS="")
    environ = json.loads((run.folder / "shown").read_text())["environ"]
    assert environ.items() >= {"NODE_RANK": "0", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "3"}.items()
    assert environ["PET_MASTER_PORT"] == environ["MASTER_PORT"] == "29123"
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & environ.keys()


def test_the_command_of_a_launcher(program):
    run = program("sh", "-c", "touch ready; sleep 30")
    with run.directory.rank_log(0).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "hpctrain.program", run.directory.path],
            env=run.variables(parent=os.getpid()),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    run.await_file("ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert run.record().reason is Reason.INTERRUPTED
    times = read_times(run.directory.attempt(1))
    assert times["import_s"] > 0


def test_a_program_runs_in_the_copy_of_its_code(program, tmp_path):
    run = program(sys.executable, "-Sc", SHOW)
    folder = run.directory.code / "d1"
    (folder / "scripts").mkdir(parents=True)
    code = CodeSnapshot(run=run.directory, digest="d1", folder=folder, root=tmp_path / "repository", place="scripts")
    (folder / "lib").mkdir()
    write_files(list_of(folder), [])
    record_code(run.directory, code, 1.0)
    searched = f"{tmp_path}/repository/lib:/opt/tools"
    assert run.run(HPCTRAIN_CODE="d1", PYTHONPATH=searched)[0] == 0
    shown = json.loads((folder / "scripts" / "shown").read_text())
    assert shown["cwd"] == str(folder / "scripts")
    assert shown["environ"]["HPCTRAIN_SUBMIT_DIR"] == str(tmp_path / "repository" / "scripts")
    assert shown["environ"]["PYTHONPATH"] == f"{folder}/lib:/opt/tools"
    assert Ledger(run.directory).attempt(1).code == "d1"
    assert (
        f"the copy of the code, {folder}, contains what the program wrote: scripts/shown; write into $HPC" in run.log()
    )


def test_a_working_directory_that_is_missing_here(program):
    run = program("true")
    run.folder.rmdir()
    assert "its working directory" in run.run()[1].message


# the second of two ranks, where SLURM may have given the first task to either node
BY_SWITCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_JOB_SLUID": "s7FDM8C2BBZ100",
    "SLURMD_NODENAME": "n1",
}
OF_TORCH = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")


def test_a_program_gets_the_node_that_rank_zero_has_recorded(program):
    run = program("sh", "-c", 'echo "$RANK at $MASTER_ADDR" > shown')
    process = run.start(rank=1, **OF_TORCH, **BY_SWITCH)
    time.sleep(0.3)
    zero = {"rank": 0, "node": "n2", "host": "n2.example", "pid": 1, "time": 1.0}
    (run.directory.attempt(run.attempt) / "start_0.json").write_text(json.dumps(zero))
    assert process.wait() == 0
    assert (run.folder / "shown").read_text() == "1 at n2\n"
    own = json.loads((run.directory.attempt(run.attempt) / "start_1.json").read_text())
    assert (own["rank"], own["node"]) == (1, "n1")


def test_a_signal_ends_the_wait_for_rank_zero(program):
    run = program("sh", "-c", "touch started")
    process = run.start(rank=1, **OF_TORCH, **BY_SWITCH)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    record = run.record(rank=1)
    assert (record.reason, record.stop_signal) == (Reason.INTERRUPTED, signal.SIGTERM)
    assert not (run.folder / "started").exists()


PRINTS = """
import os, time
open("ready", "w")
while not os.path.exists("go"):
    time.sleep(0.01)
for _ in range(99):
    print("x" * 99)
"""


def test_a_full_disk_costs_lines_of_the_log_and_not_the_program(program):
    run = program(sys.executable, "-Sc", PRINTS)
    process = run.start()
    run.await_file("ready")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2000, 2000))
    (run.folder / "go").touch()
    assert process.wait() == 0
    record = run.record()
    assert record.reason is Reason.COMPLETED
    assert run.log().count("x" * 99 + "\n") + record.lost_lines == 99 + 1  # with this rank's line on the end
    assert record.lost_bytes > 8000
