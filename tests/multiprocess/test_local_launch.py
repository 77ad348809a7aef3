"""`cluster=local` as users run it: real processes, real signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hpctrain.attempt.out_of_memory import oom_kills
from hpctrain.launch.cancellation import cancel
from hpctrain.launch.local import rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.report.run_page import run_page
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Ledger
from hpctrain.status.before_launch import OtherRuns
from hpctrain.status.run_status import read_statuses

PATIENCE_S = 150.0
TRIAL = (
    "task=custom",
    "task._target_=tests.multiprocess.programs.trial.Trial",
    "logger.tensorboard=false",
    "logger.every_steps=1",
    "trainer.global_batch_size=8",
    "optimizer.lr=0.01",
    "schedule=cosine",
    "trainer.max_epochs=null",
    "trainer.max_steps=10",
)
TWO = "cluster.processes_per_node=2"


def processes_of(path):
    """Processes that name the run directory: pid and state by /proc."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(path) in command and state not in "ZX":
            found[int(entry.name)] = command
    return found


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)  # most conditions read the command lines of all processes
    return found


class Command:
    """A command in a process group of its own, as a shell would start it."""

    def __init__(self, words, variables, folder, path):
        self.path = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=variables,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        """Wait until no process of the run is left; returns exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        wait_for(lambda: not processes_of(self.path), f"the end of {processes_of(self.path)}")
        return self.process.returncode, out, err

    def kill(self):
        """End it and the run's processes, where a test has failed."""
        if self.process.poll() is None:
            self.process.kill()
        with self.process:  # closes its pipes
            pass
        for pid in processes_of(self.path):
            os.kill(pid, signal.SIGKILL)

    def log(self, rank):
        return (self.path / "logs" / f"rank_{rank}.log").read_text()

    def wait_for_log(self, text, rank=0):
        def said():
            try:
                return text in self.log(rank)
            except FileNotFoundError:
                return False

        wait_for(lambda: said() or self.process.poll() is not None, f"{text!r} in the log of rank {rank}")
        assert said(), self.process.communicate()


@pytest.fixture
def start(variables, tmp_path):
    """Starts `python -m hpctrain` on the run directory `tmp_path/run`; what is still there at the end is killed."""
    started = []

    def run(*words, **more):
        started.append(Command(["hpctrain", *words], variables | more, tmp_path, tmp_path / "run"))
        return started[-1]

    yield run
    for command in started:
        command.kill()


@pytest.fixture
def launch(start, tmp_path):
    """Starts the training of two ranks."""

    def run(*words, **more):
        return start(f"run_dir={tmp_path / 'run'}", TWO, *TRIAL, *words, **more)

    return run


@pytest.fixture
def record(tmp_path, run_at):
    return run_at(tmp_path / "run")


TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "-m", "hpctrain")
UNATTENDED = {
    "error": (["hpctrain", TWO, "data.num_workers=1"], {"TRIAL_ACT": "1:3:raise"}),
    "torchrun": ([*TORCHRUN, "name=torch"], {}),
}


@pytest.fixture(scope="module", autouse=True)
def unattended(variables, tmp_path_factory):
    """Runs that no test interferes with: started together, since they mostly wait."""
    started = {}
    for name, (words, more) in UNATTENDED.items():
        folder = tmp_path_factory.mktemp("unattended")
        place = [f"run_dir={folder / 'run'}"] if words[0] == "hpctrain" else []
        started[name] = Command([*words, *TRIAL, *place], variables | more, folder, folder / "run")
    yield started
    for command in started.values():
        command.kill()


def test_two_ranks_train_and_ctrl_c_stops_them_and_resume_goes_on(launch, start, record, train, tmp_path):
    command = launch("trainer.max_steps=60", "data.num_workers=1", TRIAL_SLEEP="0.1")
    command.wait_for_log("step 1/60")
    assert len(processes_of(command.path)) > 2  # the ranks, and their loading processes
    command.signal(signal.SIGINT)
    code, out, err = command.wait()
    assert code == 4, err
    ((_, reason, stopped),) = record.attempts
    assert reason == "interrupted"
    assert record.steps == [stopped]
    assert f"hpctrain: stopped after step {stopped}" in err
    assert f"to resume: python -m hpctrain resume {command.path}" in err
    assert "Traceback" not in out + err
    assert out.startswith(f"run directory {command.path}\n")
    assert "step 1/60" in out
    assert "KeyboardInterrupt" not in command.log(0) + command.log(1)

    command = start("resume", str(command.path), "data.num_workers=0")
    code, out, err = command.wait()
    assert (code, err) == (0, "")
    assert record.attempts[1:] == [(stopped, "completed", 60)]
    assert f"resuming at step {stopped}" in out
    code, straight, output = train("straight", *TRIAL, "trainer.max_steps=60", world_size=2)
    assert code == 0, output
    assert (record.digest, record.metrics) == (straight.digest, straight.metrics)


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_at_once(launch, record):
    command = launch(TRIAL_ACT="0:3:hang,1:3:hang")
    for rank in range(2):
        command.wait_for_log("hanging", rank)
    command.signal(signal.SIGINT)
    for rank in range(2):
        command.wait_for_log(f"hears {signal.SIGINT:d}", rank)  # a second one before that would be lost
    time.sleep(1)  # one Ctrl-C alone ends no rank
    assert command.process.poll() is None
    began = time.monotonic()
    command.signal(signal.SIGINT)
    code, _, err = command.wait()
    assert time.monotonic() - began < 30, "they would hang for much longer"
    assert code == 4, err
    ((_, reason, _),) = record.attempts
    assert reason == "interrupted"
    assert "Traceback" not in err


@pytest.mark.nightly  # the gate has two other second ones
def test_a_second_ctrl_c_ends_ranks_that_wait_for_each_other_at_once(launch, record):
    command = launch(TRIAL_ACT="1:3:hang")
    command.wait_for_log("hanging", 1)
    command.signal(signal.SIGINT)
    command.wait_for_log(f"hears {signal.SIGINT:d}", 1)
    command.signal(signal.SIGINT)
    code, _, err = command.wait()
    assert code == 4, err
    assert [entry[1] for entry in record.attempts] == ["interrupted"]


@pytest.mark.nightly
@pytest.mark.parametrize(("keep_best", "world_size"), [(0, 1), (1, 1), (1, 2)])
def test_a_second_ctrl_c_does_not_wait_for_a_checkpoint_that_is_being_written(
    start, record, tmp_path, keep_best, world_size
):
    """One rank trains in the launching process, whose exit would wait for the thread that writes."""
    disk = {"DISK_GATE": str(tmp_path / "never"), "DISK_WRITES": str(tmp_path / "writes")}
    words = [
        f"run_dir={tmp_path / 'run'}",
        *TRIAL,
        "task._target_=tests.multiprocess.programs.slow_disk.SlowDisk",
        "checkpoint.every_steps=9",
    ]
    words += ["trainer.max_steps=1000000", f"checkpoint.keep_best={keep_best}"]
    words += [f"cluster.processes_per_node={world_size}"]
    command = start(*words, TRIAL_SLEEP="0.02", **disk)
    wait_for((tmp_path / "writes").exists, "a checkpoint to be written")
    if keep_best:  # the second one waits for the first one, or for a stop
        command.wait_for_log("waits for the one before")
    command.signal(signal.SIGINT)
    command.wait_for_log("stopping: Ctrl-C")
    time.sleep(0.5)  # two signals at once are one
    command.signal(signal.SIGINT)
    code, _, err = command.wait()
    assert code == 4, err
    assert [entry[1] for entry in record.attempts] == ["interrupted"]
    assert record.steps == []
    assert "Traceback" not in err


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (1, 2), (2, 1)])
def test_a_stop_is_noticed_while_the_ranks_wait_for_samples(start, record, train, tmp_path, world_size, workers, kind):
    """In the first step, of which nothing is saved, and in a later one, before which they save.

    A rank that reads itself ends its read in a later step, which may have changed the task's own state.
    """
    held = tmp_path / "held"
    more = {"HELD": str(held), "HELD_KIND": kind, "TRIAL_SLEEP": "0.1"}
    words = [
        *TRIAL,
        "task._target_=tests.multiprocess.programs.held.Held",
        "trainer.max_steps=40",
        "trainer.eval_every_steps=10",
    ]
    words += [f"cluster.processes_per_node={world_size}", f"data.num_workers={workers}"]

    def stop_while_waiting(command, number, read_ends=False):
        wait_for(lambda: len([*tmp_path.glob("held.*")]) >= world_size or command.process.poll(), "every rank to wait")
        time.sleep(1)  # for the rank, where its loading processes are ahead
        began = time.monotonic()
        command.signal(number)
        if read_ends:
            time.sleep(1)
            assert command.process.poll() is None
            held.unlink()
        code, _, err = command.wait()
        assert code == 4, err
        assert time.monotonic() - began < 20, "workers that are busy get 5 s"
        assert "Traceback" not in err
        held.unlink(missing_ok=True)
        for path in tmp_path.glob("held.*"):
            path.unlink()

    held.touch()
    stop_while_waiting(start(f"run_dir={tmp_path / 'run'}", *words, **more), signal.SIGTERM)
    assert record.steps == []
    if kind == "train":  # all ranks in the same step
        held.touch()
    command = start("resume", str(tmp_path / "run"), **more, HELD_FROM="24" if kind == "train" else "0")
    command.wait_for_log("step 1/40")
    held.touch()
    stop_while_waiting(command, signal.SIGINT, read_ends=kind == "train" and workers == 0)
    stopped = record.attempts[1][2]
    assert record.steps[-1] == stopped
    assert 0 < stopped < 40
    code, _, err = start("resume", str(tmp_path / "run"), **more).wait()
    assert (code, err) == (0, "")
    code, straight, output = train("straight", *words, world_size=world_size, **more)
    assert code == 0, output
    assert (record.digest, record.metrics) == (straight.digest, straight.metrics)


def stopped(path):
    found = []
    for pid in processes_of(path):
        with suppress(OSError):
            if " T " in Path(f"/proc/{pid}/stat").read_text():
                found.append(pid)
    return found


@pytest.mark.nightly
def test_a_signal_before_the_ranks_are_there_is_not_lost(launch, record):
    command = launch("trainer.max_steps=1000", TRIAL_SLEEP="0.1")
    wait_for(lambda: any("hpctrain.train" in line for line in processes_of(command.path).values()), "a rank")
    command.signal(signal.SIGTERM)
    code, _, err = command.wait()
    assert code == 4, err
    assert [entry[1] for entry in record.attempts] == ["interrupted"]
    assert "Traceback" not in err + command.log(0) + command.log(1)


@pytest.mark.nightly
def test_nothing_outlives_a_launcher_that_is_killed(launch, record):
    """Neither ranks that can't notice it, because they hang, nor their loading processes."""
    command = launch("data.num_workers=1", TRIAL_ACT="0:3:hang,1:3:hang")
    for rank in range(2):
        command.wait_for_log("hanging", rank)
    assert len(processes_of(command.path)) >= 5
    command.signal(signal.SIGKILL)
    command.wait()
    assert record.attempts == [(0, "None", None)]
    code, _, err = launch("data.num_workers=1").wait()
    assert code == 0, err
    first, second = record.attempts
    # the last step that rank zero wrote down before it was killed; it hung in its third
    assert (first[:2], first[2] <= 2, second) == ((0, "infrastructure"), True, (0, "completed", 10))


def test_one_rank_runs_in_the_launching_process(fork_server, tmp_path):
    (tmp_path / "record").mkdir()
    words = [f"run_dir={tmp_path / 'run'}", *TRIAL, "trainer.max_steps=3"]
    (done,) = fork_server.wait(fork_server.start("command:run", *words, TRIAL_RECORD=str(tmp_path / "record")))
    assert done.code == 0, done.output
    assert [path.name for path in (tmp_path / "record").iterdir()] == [f"0_{done.pid}"]
    assert done.output.splitlines()[0] == f"run directory {tmp_path / 'run'}"


@pytest.mark.parametrize(
    ("action", "reason", "detail"),
    [
        ("exit", "infrastructure", "rank 0 of 1 ended without an exit record"),
        ("unprintable", "failed", "UnprintableError: (its __str__ raises ZeroDivisionError)"),
    ],
)
def test_an_odd_end_of_the_launching_process_is_recorded(fork_server, tmp_path, run_at, action, reason, detail):
    words = [f"run_dir={tmp_path / 'run'}", *TRIAL, "data.num_workers=1"]
    (done,) = fork_server.wait(fork_server.start("command:run", *words, TRIAL_ACT=f"0:2:{action}"))
    assert done.code == 1, done.output
    ended = Ledger(run_at(tmp_path / "run").directory).attempt(1)
    assert (ended.reason, ended.end_step) == (reason, 1)
    assert detail in ended.detail


@pytest.mark.parametrize("number", [signal.SIGSEGV, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_a_launching_process_that_died_is_not_running_and_the_same_command_continues(
    fork_server, tmp_path, run_at, number
):
    words = [f"run_dir={tmp_path / 'run'}", *TRIAL, "data.num_workers=1"]
    (done,) = fork_server.wait(fork_server.start("command:run", *words, TRIAL_ACT=f"0:2:{number.name}"))
    assert done.code == -number, done.output
    assert ("Fatal Python error" in done.output and "in _act" in done.output) == (number == signal.SIGSEGV)
    run = RunDirectory.at(tmp_path / "run")
    (status,) = read_statuses([run])
    gone = f"process {done.pid} on {socket.gethostname()} is gone and recorded no end"
    assert (status.state, status.note) == ("interrupted", f"{gone}: it was killed, or it crashed")
    assert cancel(run) == "nothing to cancel: the run is interrupted"
    assert [one.state for one in OtherRuns.read([str(run.path)]).stopped] == ["interrupted"]
    assert "interrupted" in run_page(run)
    (done,) = fork_server.wait(fork_server.start("command:run", *words))
    assert done.code == 0, done.output
    assert [entry[1] for entry in run_at(run.path).attempts] == ["infrastructure", "completed"]
    assert "its processes were killed (perhaps for lack of memory) or crashed" in Ledger(run).attempt(1).detail


@pytest.mark.parametrize("change", ["task.width=7", "checkpoint.metric=los"])
def test_a_change_with_which_no_attempt_can_train_is_taken_back(fork_server, tmp_path, run_at, change):
    words = [f"run_dir={tmp_path / 'run'}", *TRIAL]
    (done,) = fork_server.wait(fork_server.start("command:run", *words, "trainer.max_steps=2"))
    assert done.code == 0, done.output
    config = tmp_path / "run" / "config.yaml"
    before = config.read_bytes()
    words = ["resume.allow_config_change=true", change, "trainer.max_steps=4"]
    (done,) = fork_server.wait(fork_server.start("command:run", "resume", str(tmp_path / "run"), *words))
    assert done.code == 1, done.output
    assert run_at(tmp_path / "run").attempts == [(0, "completed", 2), (2, "failed", 2)]
    assert (config.read_bytes(), list(config.parent.glob("*.before*"))) == (before, [])
    assert "restored the configuration from before this resume" in done.output


def test_an_error_in_the_launching_process_is_shown_once(fork_server, tmp_path, run_at):
    words = [f"run_dir={tmp_path / 'run'}", *TRIAL]
    (done,) = fork_server.wait(fork_server.start("command:run", *words, TRIAL_ACT="0:2:raise"))
    assert done.code == 1
    assert done.output.count("Traceback") == 1
    assert "in loss\n" in done.output
    assert run_at(tmp_path / "run").attempts == [(0, "failed", 1)]


def test_ranks_by_variables_set_by_hand_train_and_launch_nothing(ranks, tmp_path, run_at):
    words = [f"run_dir={tmp_path / 'run'}", *TRIAL, "trainer.max_steps=6"]
    done = ranks("command:run", *words, world_size=2)
    assert [process.code for process in done] == [0, 0], done[0].output
    record = run_at(tmp_path / "run")
    assert record.attempts == [(0, "completed", 6)]
    assert sorted(read_exit_records(record.directory.attempt(1))) == [0, 1]
    assert "step 6/6" in done[0].output
    assert "step" not in done[1].output
    assert "step 6/6" in record.directory.rank_log(0).read_text()
    assert Owner.read(record.directory.attempt(1)).pid == done[0].pid


def test_a_rank_by_hand_that_finds_no_rank_zero_says_where_it_looked(fork_server, port, tmp_path):
    words = [f"run_dir={tmp_path / 'run'}", *TRIAL, "health.start_timeout_s=4"]
    (done,) = fork_server.wait(fork_server.start("command:run", *words, folder=tmp_path, **rank_variables(1, 2, port)))
    assert done.code == 1
    assert f"rank zero did not make the folder {tempfile.gettempdir()}/hpctrain-" in done.output


def test_an_error_of_ranks_by_hand_closes_the_attempt(ranks, tmp_path, run_at):
    done = ranks("command:run", f"run_dir={tmp_path / 'run'}", *TRIAL, world_size=2, TRIAL_ACT="1:3:raise")
    assert [process.code for process in done] == [1, 1]
    assert "ValueError: no luck in call 3" in done[1].output
    assert "Traceback" not in done[0].output
    ((_, reason, _),) = run_at(tmp_path / "run").attempts
    assert reason == "failed"


@pytest.mark.nightly
def test_a_task_prints_though_the_disk_of_its_log_is_full(composer, variables, record):
    path = record.directory.path
    words = [f"run_dir={path}", *TRIAL, "task._target_=tests.multiprocess.programs.printing.Printing"]
    prepare(composer.compose(words, world_size=1), words)
    command = [sys.executable, "-u", "-m", "hpctrain.train", path]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=full, env=variables, check=False)
    assert record.attempts == [(0, "completed", 10)]
    assert done.returncode == 0


def test_an_error_of_rank_one_is_shown_with_its_traceback(unattended, run_at):
    command = unattended["error"]
    code, out, err = command.wait()
    assert code == 1
    assert run_at(command.path).attempts == [(0, "failed", 2)]
    assert re.search(
        r"^hpctrain: failed: rank 1 on \S+, after step 2: ValueError: no luck in call 3\nTraceback", err, re.MULTILINE
    )
    assert re.search(r'trial\.py", line \d+, in loss\n', err)
    assert err.count("Traceback") == 1
    assert "Traceback" not in out
    assert f"once the cause is fixed, resume with: python -m hpctrain resume {command.path}" in err


def test_a_rank_that_is_killed(fork_server, tmp_path, run_at):
    words = [f"run_dir={tmp_path / 'run'}", TWO, *TRIAL]
    (done,) = fork_server.wait(fork_server.start("command:run", *words, TRIAL_ACT="1:3:SIGKILL"))
    assert done.code == 1
    ((_, reason, _),) = run_at(tmp_path / "run").attempts
    assert reason == "infrastructure"
    died = f"rank 1 on {socket.gethostname()}: killed by SIGKILL, by hand or because memory ran out; see its log"
    assert f"hpctrain: infrastructure: {died}" in done.output
    assert "Traceback" not in done.output


def test_torchrun_starts_the_ranks_and_they_launch_nothing(unattended, run_at):
    command = unattended["torchrun"]
    code, out, err = command.wait()
    assert code == 0, err
    (path,) = (command.path.parent / "runs" / "torch").iterdir()
    record = run_at(path)
    assert record.attempts == [(0, "completed", 10)]
    assert sorted(read_exit_records(record.directory.attempt(1))) == [0, 1]
    assert out.count("step 10/10  eval/loss") == 1


@pytest.mark.nightly
def test_a_bad_configuration_of_ranks_by_hand_is_said_once(ranks, tmp_path):
    done = ranks("command:run", f"run_dir={tmp_path / 'run'}", *TRIAL, "trainer.max_stepz=6", world_size=2)
    assert [process.code for process in done] == [2, 2]
    said = "".join(process.output for process in done)
    assert said.count("hpctrain: error:") == 1
    assert "hpctrain: error: trainer.max_stepz=6: " in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_torchrun_with_a_bad_configuration(variables, tmp_path):
    command = Command([*TORCHRUN, "trainer.max_stepz=6", *TRIAL], variables, tmp_path, tmp_path / "run")
    code, out, err = command.wait()
    assert code != 0
    assert (out + err).count("hpctrain: error:") == 1
    assert "hpctrain: error: trainer.max_stepz=6: " in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_a_terminal_has_a_bar_and_the_log_has_lines(variables, tmp_path, processes):
    master, slave = pty.openpty()
    words = [*TRIAL, f"run_dir={tmp_path / 'run'}", f"cluster.processes_per_node={processes}"]
    with subprocess.Popen(
        [sys.executable, "-m", "hpctrain", *words], env=variables, cwd=tmp_path, stdout=slave, stderr=slave, stdin=slave
    ) as process:
        os.close(slave)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while data := os.read(master, 65536):
                shown += data
    os.close(master)
    assert process.returncode == 0
    drawn = shown.decode().split("\r\x1b[K")
    assert any(re.match(r"step 10/10 100%\|█+\|  epoch", line) for line in drawn)
    assert any(re.match(r"step 10/10  eval/loss [\d.]+\r\n", line) for line in drawn)
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert log.count("step 10/10  eval/loss") == 1
    assert "%|" not in log


@pytest.fixture
def little_memory():
    """A control group with half a gigabyte: the file that takes the processes."""
    groups = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    parent = next((group for group in groups if (group / "cgroup.procs").is_file()), None)
    group = None if parent is None else parent / f"hpctrain_{os.getpid()}"
    try:
        assert group is not None
        group.mkdir()
        limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
        limit.write_text("500000000")
    except (AssertionError, OSError, StopIteration):
        pytest.skip("needs root and control groups for memory")
    yield group / "cgroup.procs"
    wait_for(lambda: not (group / "cgroup.procs").read_text().strip(), "the end of all processes in the control group")
    group.rmdir()


@pytest.mark.nightly
def test_one_of_two_ranks_that_the_kernel_kills_for_its_memory(little_memory, variables, run_at, tmp_path):
    words = [*TRIAL, f"run_dir={tmp_path / 'run'}", "cluster.processes_per_node=2"]
    command = f'echo $$ > {little_memory}; exec {sys.executable} -m hpctrain "$@"'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *words],
        env=variables | {"TRIAL_ACT": "0:5:eat_memory"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert "out_of_memory: killed by the kernel; use a smaller data.num_workers" in done.stderr
    assert [reason for _, reason, _ in run_at(tmp_path / "run").attempts] == ["out_of_memory"]


KILLS = """
import subprocess, sys
from hpctrain.attempt.out_of_memory import oom_kills
before = oom_kills()
code = subprocess.run([sys.executable, "-S", "-c", "held = b'x' * 2_000_000_000"]).returncode
print(code, oom_kills() - before)
"""


def test_a_kill_is_counted_in_its_control_group_alone(little_memory):
    before = oom_kills()
    command = f'echo $$ > {little_memory}; exec {sys.executable} -c "$1"'
    done = subprocess.run(["sh", "-c", command, "sh", KILLS], capture_output=True, text=True, check=True)
    assert done.stdout == f"{-signal.SIGKILL} 1\n"
    assert oom_kills() == before


def notifications(folder):
    """What the command of `keeps` got, in order."""
    return sorted((json.loads(path.read_text()) for path in folder.iterdir()), key=lambda one: one["time"])


@pytest.fixture
def keeps(tmp_path):
    """A notify.command that keeps what it gets, and then hangs."""
    (tmp_path / "seen").mkdir()
    written = f"cat > {tmp_path}/half_$$ && mv {tmp_path}/half_$$ {tmp_path}/seen/$$"
    return f"notify.command='{written}; echo kept; sleep 600'"


def test_a_command_learns_of_a_runs_start_its_cancellation_and_its_end(launch, start, record, tmp_path, keeps):
    """And hangs each time."""
    command = launch("trainer.max_steps=60", keeps, "notify.timeout_s=600", TRIAL_SLEEP="0.1")
    command.wait_for_log("step 1/60")
    run = RunDirectory.at(command.path)
    assert cancel(run) == f"asked process {command.process.pid} to stop after its current step and save"
    assert "once more" in cancel(run)  # which isn't a second Ctrl-C
    code, _, err = command.wait()
    assert code == 3, err
    ((_, reason, last),) = record.attempts
    assert (reason, record.steps) == ("cancelled", [last])
    assert cancel(run) == "nothing to cancel: the run is cancelled"
    assert "notify.command took more than" in err
    code, _, err = start("resume", str(command.path), "trainer.max_steps=20", "notify.timeout_s=1").wait()
    assert code == 0, err
    found = notifications(tmp_path / "seen")
    assert [(one["event"], one["attempt"], one["job_id"]) for one in found] == [
        ("started", 1, None),
        ("cancelled", 1, None),
        ("started", 2, None),
        ("completed", 2, None),
    ]
    stopped = found[1]["step"]
    assert found[1]["message"].startswith(f"cancelled after step {stopped}; the run ends here; to resume: ")
    assert (command.path / "logs" / "notify.log").read_text() == "kept\n" * 4


@pytest.mark.nightly
def test_a_suspended_run_is_cancelled(launch, start, record):
    command = launch("trainer.max_steps=60", TRIAL_ACT="1:3:SIGSTOP")
    wait_for(lambda: stopped(command.path), "rank 1 to be stopped")
    command.signal(signal.SIGSTOP)
    wait_for(lambda: command.process.pid in stopped(command.path), "the launcher to be stopped")
    cancel(RunDirectory.at(command.path))
    code, _, err = command.wait()
    assert code == 3, err
    code, _, err = start("resume", str(command.path)).wait()
    assert code == 0, err
    assert [entry[1] for entry in record.attempts] == ["cancelled", "completed"]


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_is_cancelled_from_another_machine(start, record, tmp_path, processes):
    words = [f"run_dir={tmp_path / 'run'}", f"cluster.processes_per_node={processes}", *TRIAL, "trainer.max_steps=1000"]
    command = start(*words, TRIAL_SLEEP="0.1")
    command.wait_for_log("step 1/1000")
    owner = RunDirectory.at(command.path).attempt(1) / "owner.json"
    owner.write_text(json.dumps({**json.loads(owner.read_text()), "host": "another"}))
    assert cancel(RunDirectory.at(command.path)).startswith(f"asked process {command.process.pid} on another to stop")
    code, _, err = command.wait()
    assert code == 3, err
    assert [entry[1] for entry in record.attempts] == ["cancelled"]


@pytest.mark.nightly
def test_ranks_by_hand_are_cancelled(variables, tmp_path, run_at):
    words = [*TORCHRUN, *TRIAL, "trainer.max_steps=1000", f"run_dir={tmp_path / 'run'}"]
    command = Command(words, {**variables, "TRIAL_SLEEP": "0.1"}, tmp_path, tmp_path / "run")
    try:
        command.wait_for_log("step 1/1000")
        cancel(RunDirectory.at(command.path))
        command.wait()
        assert [entry[1] for entry in run_at(command.path).attempts] == ["cancelled"]
    finally:
        command.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("search", [[], ["sweep=asha", "sweep.min_steps=20"]], ids=["grid", "asha"])
@pytest.mark.parametrize("named", ["run", "run/0"])
def test_a_sweep_is_cancelled_as_a_whole_or_one_run_of_it(start, variables, tmp_path, search, named):
    steps = ["trainer.max_steps=60", "trainer.eval_every_steps=20"]
    varied = ["optimizer.lr=0.01,0.02,0.03"]
    command = start("-m", f"run_dir={tmp_path / 'run'}", *TRIAL, *steps, *search, *varied, TRIAL_SLEEP="0.1")
    first = tmp_path / "run" / "0" / "logs" / "rank_0.log"
    wait_for(lambda: first.exists() and "step 1/60" in first.read_text(), "the first run")
    words = [sys.executable, "-m", "hpctrain", "cancel", str(tmp_path / named)]
    subprocess.run(words, env=variables, check=True, capture_output=True)
    code, out, err = command.wait()
    assert code == 3, out + err
    runs = [RunDirectory.at(tmp_path / "run" / str(number)) for number in range(3)]
    reasons = [[str(attempt.reason) for attempt in Ledger(run).attempts()] for run in runs]
    assert reasons[0] == ["cancelled"]
    assert (reasons[1:] == [[], []]) == (named == "run")
    code, out, err = start("resume", str(tmp_path / "run")).wait()
    assert code == 0, out + err


@pytest.mark.nightly
@pytest.mark.parametrize("suspended", [False, True])
def test_a_cancelled_program_is_cancelled_everywhere_and_resumed(start, record, tmp_path, keeps, suspended):
    saves = f"trap 'touch {tmp_path}/saved; exit 0' TERM; [ -e {tmp_path}/saved ] || while true; do sleep 0.1; done"
    script = f"echo ready; {saves} # {tmp_path / 'run'}"
    words = ["code.snapshot=none", TWO, keeps, "notify.timeout_s=1", "notify.on=[cancelled]", "--", "sh", "-c", script]
    command = start("run", f"run_dir={tmp_path / 'run'}", *words)
    for rank in range(2):
        command.wait_for_log("ready", rank)
    shells = [pid for pid, line in processes_of(command.path).items() if line.startswith("sh -c")]
    for pid in shells if suspended else []:
        os.kill(pid, signal.SIGSTOP)
    run = RunDirectory.at(command.path)
    cancel(run)
    code, _, err = command.wait()
    assert (code, len(shells)) == (3, 2), err
    assert "to resume: python -m hpctrain resume" in err
    assert [one["reason"] for one in notifications(tmp_path / "seen")] == ["cancelled"]
    assert read_statuses([run])[0].state == "cancelled"
    code, _, err = start("resume", str(command.path)).wait()
    assert code == 0, err
    assert [entry[1] for entry in record.attempts] == ["cancelled", "completed"]


def test_a_command_learns_of_a_task_that_ends_the_process(fork_server, tmp_path, keeps):
    words = [f"run_dir={tmp_path / 'run'}", *TRIAL, keeps, "notify.timeout_s=1", "notify.on=[failed]"]
    (done,) = fork_server.wait(fork_server.start("command:run", *words, TRIAL_ACT="0:2:exit"))
    assert done.code == 1, done.output
    (found,) = notifications(tmp_path / "seen")
    assert (found["event"], found["reason"]) == ("failed", "infrastructure")


def test_a_command_learns_of_a_program_that_failed(fork_server, tmp_path, keeps):
    words = ["run", f"run_dir={tmp_path / 'run'}", keeps, "notify.timeout_s=1", "--", "sh", "-c", "exit 3"]
    (done,) = fork_server.wait(fork_server.start("command:run", *words))
    assert done.code == 1, done.output
    started, failed = notifications(tmp_path / "seen")
    assert (started["event"], failed["event"], failed["reason"]) == ("started", "failed", "failed")
    assert "3" in failed["message"]
