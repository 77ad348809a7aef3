from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from hpctrain.attempt.notification import Notifier
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.compose import Composer
from hpctrain.errors import ExitCode
from hpctrain.launch import local
from hpctrain.launch.local import LocalRanks, copy_output, free_port, launch_local, rank_variables
from hpctrain.launch.prepare import prepare
from hpctrain.rank.private_folder import lockable_folder
from hpctrain.rank.rank import Member, Rank
from hpctrain.rank.stacks import StackPosition
from hpctrain.rank.stop_request import STOP_SIGNALS, StopRequest
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.launcher import LauncherFacts
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.times import Times
from hpctrain.streams import LogFile, LostOutput

START = """
import json, os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
heard = []
def hear(number, frame):
    heard.append(number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hear)
blocked = sorted(signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals()))
folder.joinpath("there_" + rank).write_text(json.dumps([os.getpid(), dict(os.environ), blocked]))
def wait_for_signal():
    while not heard:
        time.sleep(0.01)
    return heard[0]
"""
"""What every rank of these tests begins with: no torch, a fraction of its start-up time."""


@pytest.fixture
def ranks(directory):
    directory.attempt(3).mkdir()
    return LocalRanks(directory, attempt=3, world_size=2, port=29123)


@pytest.fixture
def command():
    """Ranks that do this."""
    return lambda text: [sys.executable, "-S", "-u", "-c", START + text]


@pytest.fixture
def there(directory):
    """Process id, environment and blocked signals of each rank, once it is there."""

    def wait(world_size=2):
        paths = [directory.path / f"there_{rank}" for rank in range(world_size)]
        deadline = time.monotonic() + 30
        while not all(path.exists() and path.read_text() for path in paths):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in paths]

    return wait


@pytest.fixture
def then(there):
    """Does something to this process when the ranks are there."""
    threads = []

    def start(*actions):
        def act():
            there()
            for action in actions:
                time.sleep(0.1)
                action()

        threads.append(threading.Thread(target=act))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def send(number):
    return lambda: os.kill(os.getpid(), number)


def gone(pids):
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_rank_knows_its_place_and_its_launcher(ranks, command, there, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("MY_OWN", "stays")
    ranks.run(command(""))
    environments = [environment for _, environment, _ in there()]
    for rank, environment in enumerate(environments):
        assert environment.items() >= rank_variables(rank, 2, 29123).items()
        assert environment["HPCTRAIN_CLAIM"] == "3"
        assert environment["HPCTRAIN_PARENT"] == str(os.getpid())
        assert environment["HPCTRAIN_LOGGED"] == "1"
        assert environment["MY_OWN"] == "stays"
        assert not [name for name in environment if name.startswith("SLURM")]
    assert environments[0]["HPCTRAIN_STORE"] == environments[1]["HPCTRAIN_STORE"] != ""


STORE = """
store = Path(os.environ["HPCTRAIN_STORE"])
store.touch()
try:
    seen = subprocess.run(["cat", store], user=NOBODY, capture_output=True, text=True).stderr
except PermissionError:
    seen = "not root"
folder.joinpath("seen_" + rank).write_text(json.dumps([store.parent.stat().st_mode, seen]))
"""


def test_the_ranks_meet_where_no_other_user_may_enter(ranks, command, directory, there):
    ranks.run(command("import subprocess\nNOBODY = 65_534" + STORE))
    for rank in range(2):
        mode, seen = json.loads((directory.path / f"seen_{rank}").read_text())
        assert stat.S_IMODE(mode) == 0o700
        assert "Permission denied" in seen or seen == "not root"
    # nothing is left behind
    assert not Path(there()[0][1]["HPCTRAIN_STORE"]).parent.exists()
    assert not (directory.attempt(3) / "secret").exists()


def test_where_temporary_files_cannot_be_locked_the_ranks_meet_in_memory(ranks, command, there, monkeypatch, tmp_path):
    """torch's FileStore locks its file with flock, which some network file systems refuse."""
    lock = fcntl.flock

    def refused(file, *rest):
        number = file if isinstance(file, int) else file.fileno()
        if Path(f"/proc/self/fd/{number}").readlink().is_relative_to(tmp_path):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        lock(file, *rest)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert lockable_folder() == str(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refused)
    ranks.run(command(""))
    assert there()[0][1]["HPCTRAIN_STORE"].startswith("/dev/shm/hpctrain-")


def test_rank_zero_prints_to_the_console_and_each_rank_to_its_log(ranks, command, directory, capfdbinary):
    directory.rank_log(0).write_text("an earlier attempt\n")
    ranks.run(command("print('out of', rank); print('err of', rank, file=sys.stderr)"))
    out, err = capfdbinary.readouterr()
    assert (out, err) == (b"out of 0\nerr of 0\n", b"")
    assert directory.rank_log(0).read_text() == "an earlier attempt\nout of 0\nerr of 0\n"
    assert directory.rank_log(1).read_text() == "out of 1\nerr of 1\n"


def test_a_failure_ends_the_others_after_the_grace_time_and_what_they_started(ranks, command, there, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.3)
    began = time.monotonic()
    ranks.run(
        command(
            """
if rank == "1":
    while not folder.joinpath("there_2").exists():
        time.sleep(0.01)
    sys.exit(7)
if os.fork() == 0:
    folder.joinpath("there_2").write_text(json.dumps([os.getpid()]))
time.sleep(1000)
"""
        )
    )
    assert 0.3 <= time.monotonic() - began < 100
    gone([entry[0] for entry in there(3)])


def test_rank_zero_may_finish_its_checkpoint_after_its_exit_record(ranks, command, directory, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.0)
    claim = directory.attempt(3)
    ExitRecord(rank=0, host="here", reason=Reason.FAILED, step=5, blames_peer=True).write(claim)
    ranks.run(
        command("""
if rank == "1":
    sys.exit(1)
time.sleep(0.5)
folder.joinpath("written").touch()
sys.exit(1)
""")
    )
    assert (directory.path / "written").exists()


def test_rank_zero_may_finish_a_checkpoint_while_it_still_computes(ranks, command, directory, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.0)
    monkeypatch.setattr(local, "WRITING_S", 100.0)
    (directory.checkpoints / ".tmp-step_00000005-0123abcd").mkdir(parents=True)
    ranks.run(
        command("""
if rank == "1":
    sys.exit(1)
time.sleep(0.5)
folder.joinpath("checkpoints", ".tmp-step_00000005-0123abcd").rename(folder / "checkpoints" / "step_00000005")
time.sleep(1000)
""")
    )
    assert directory.checkpoint(5).exists()


def test_ranks_that_stopped_leave_the_others_the_time_to_stop(ranks, command, directory, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.0)
    ranks.run(command("time.sleep(0.4 * int(rank)); folder.joinpath('done_' + rank).touch()"))
    assert (directory.path / "done_1").exists()


def test_a_rank_that_stopped_does_not_wait_for_ever_for_one_that_is_stuck(ranks, command, there, monkeypatch):
    monkeypatch.setattr(local, "STOPPING_S", 0.2)
    both = "while not folder.joinpath('there_0').exists(): time.sleep(0.01)\n"
    ranks.run(command(f"{both}sys.exit(0) if rank == '1' else time.sleep(1000)"))
    gone([entry[0] for entry in there()])


def test_a_rank_of_a_program_that_completed_ends_no_other(ranks, command, directory, monkeypatch):
    monkeypatch.setattr(local, "STOPPING_S", 0.0)
    monkeypatch.setattr(local, "GRACE_S", 0.0)
    ranks.independent = True
    ranks.run(command("time.sleep(0.3 * int(rank)); folder.joinpath('done_' + rank).touch()"))
    assert ranks.codes == [0, 0]
    assert (directory.path / "done_1").exists()


def test_a_rank_of_a_program_that_failed_ends_the_others(ranks, command, there, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    ranks.independent = True
    ranks.run(command("time.sleep(1000) if rank == '0' else sys.exit(1)"))
    assert ranks.codes == [None, 1]
    gone([entry[0] for entry in there()])


def test_a_rank_that_was_killed_is_known_from_those_that_are_killed_because_of_it(ranks, command, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    ranks.run(command("time.sleep(1000) if rank == '0' else os.kill(os.getpid(), signal.SIGKILL)"))
    assert ranks.codes == [None, -signal.SIGKILL]


def test_a_console_whose_reader_goes_costs_neither_the_run_nor_its_log(ranks, command, directory, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        ranks.run(command("print('one', flush=True); print('two' * 40_000, flush=True)"))
        print("afterwards", flush=True)
        monkeypatch.undo()
    assert directory.rank_log(0).read_text() == "one\n" + "two" * 40_000 + "\n"


def test_a_log_that_can_t_be_written_costs_neither_the_run_nor_the_console(tmp_path, capfdbinary):
    reader, writer = os.pipe()
    os.write(writer, b"heard\nall the same")
    os.close(writer)
    log = LogFile(Path("/dev/full"))
    copy_output(os.fdopen(reader, "rb"), log)
    assert log.lost == LostOutput(1, 18)
    console = capfdbinary.readouterr()
    assert console.out == b"heard\nall the same"
    warning = (
        b"hpctrain: warning: /dev/full can't be written (No space left on device): lines are lost while that lasts\n"
    )
    assert console.err == warning


def test_lines_replace_a_bar_and_the_rest_of_a_line_does_not(tmp_path, monkeypatch):
    pieces = [b"one\n", b"two, ", b"three\n", b"four\n", b""]
    monkeypatch.setattr(os, "read", lambda descriptor, size: pieces.pop(0))
    log, source = LogFile(tmp_path / "log"), Path(os.devnull).open("rb")  # noqa: SIM115 - they are closed there
    with (tmp_path / "console").open("w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        copy_output(source, log, over_bar=True)
        monkeypatch.undo()
    assert (tmp_path / "console").read_bytes() == b"\r\x1b[Kone\n\r\x1b[Ktwo, three\n\r\x1b[Kfour\n"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo, three\nfour\n"


def test_the_warning_on_a_log_waits_for_the_end_of_a_line(tmp_path, monkeypatch):
    pieces = [b"one, ", b"two\nthree", b"\n", b""]
    monkeypatch.setattr(os, "read", lambda descriptor, size: pieces.pop(0))
    log, source = LogFile(Path("/dev/full")), Path(os.devnull).open("rb")  # noqa: SIM115 - they are closed there
    with (tmp_path / "console").open("w", buffering=1) as console:
        monkeypatch.setattr(sys, "stdout", console)
        monkeypatch.setattr(sys, "stderr", console)
        copy_output(source, log)
        monkeypatch.undo()
    lines = (tmp_path / "console").read_text().splitlines()
    assert [lines[0], lines[1][:37], *lines[2:]] == ["one, two", "hpctrain: warning: /dev/full can't be", "three"]


def test_under_nohup_a_closed_terminal_stops_nothing(ranks, command, then, directory):
    heard = "wait_for_signal(); folder.joinpath('heard_' + rank).write_text(str(heard))"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        then(send(signal.SIGHUP), send(signal.SIGUSR2))
        ranks.run(command(heard))
        assert (directory.path / "heard_0").read_text() == f"[{int(signal.SIGUSR2)}]"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("default_sighup")
def test_a_closed_terminal_asks_the_ranks_to_stop(ranks, command, then, directory):
    then(send(signal.SIGHUP))
    ranks.run(command("wait_for_signal(); folder.joinpath('heard_' + rank).write_text(str(heard))"))
    assert [(directory.path / f"heard_{rank}").read_text() for rank in range(2)] == [f"[{int(signal.SIGTERM)}]"] * 2


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_forwarded_once(ranks, command, then, directory, number):
    then(send(number))
    ranks.run(command("wait_for_signal(); time.sleep(0.2); folder.joinpath('heard_' + rank).write_text(str(heard))"))
    assert [(directory.path / f"heard_{rank}").read_text() for rank in range(2)] == [f"[{int(number)}]"] * 2
    assert not ranks.cut_short


def test_a_second_ctrl_c_ends_at_once(ranks, command, then, there):
    # two signals that arrive before the first is handled are one
    def handled():
        deadline = time.monotonic() + 20
        while not ranks.interrupts:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    then(send(signal.SIGINT), handled, send(signal.SIGINT))
    ranks.run(command("time.sleep(1000)"))
    assert ranks.cut_short
    gone([entry[0] for entry in there()])


def test_two_different_signals_leave_time_for_the_save(ranks, command, then, directory):
    then(send(signal.SIGTERM), send(signal.SIGINT))
    ranks.run(
        command("""
while len(heard) < 2:  # once all have ended, nothing handles the second
    time.sleep(0.01)
time.sleep(0.5)
folder.joinpath('saved_' + rank).touch()
sys.exit(4)
""")
    )
    assert not ranks.cut_short
    assert all((directory.path / f"saved_{rank}").exists() for rank in range(2))


def test_signals_wait_until_a_rank_can_handle_them(ranks, command, there):
    ranks.run(command(""))
    assert [blocked for _, _, blocked in there()] == [sorted((*STOP_SIGNALS, signal.SIGHUP))] * 2


def test_afterwards_signals_are_as_before(ranks, command):
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    ranks.run(command(""))
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)


def test_an_error_while_they_start_leaves_no_process(ranks, there, directory):
    directory.rank_log(1).mkdir()
    with pytest.raises(IsADirectoryError):
        ranks.run([sys.executable, "-S", "-u", "-c", START + "time.sleep(1000)"])
    assert not [path for path in directory.path.glob("there_*") if alive(json.loads(path.read_text())[0])]
    assert ranks.processes[0].poll() is not None


def test_a_free_port_can_be_bound():
    assert 1024 <= free_port() < 65536


def test_an_error_that_all_ranks_raise_is_not_printed_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = prepare(Composer().compose(["run_dir=R", "cluster.processes_per_node=2"]), ["python"])
    attempt = Ledger(run.directory).claim()
    for rank in (1, 0):
        record = ExitRecord(
            rank=rank, host="n", reason=Reason.FAILED, step=3, message="ConfigError: no", time=2.0 - rank
        )
        record.write(run.directory.attempt(attempt))
    notifier = Notifier(run.directory, run.config, os.environ)
    ranks = LocalRanks(run.directory, attempt, 2, port=1)
    ranks.codes = [1, 1]
    assert local._Attempt(run, attempt, notifier, ()).conclude(ranks) == ExitCode.FAILED
    ended, advice = capsys.readouterr().err.splitlines()
    assert ended == "hpctrain: failed after step 3"
    assert advice.startswith("once the cause is fixed, resume with: ")


@pytest.mark.parametrize("hangs", [True, False])
def test_the_end_of_a_single_process_is_printed_once(tmp_path, monkeypatch, hangs):
    def run_rank(training):
        place = ClusterEnvironment.from_environment({})
        rank = Rank(training.config, place, LauncherFacts(attempt=1), StopRequest(), Times(0.0))
        rank.member = Member(environment=place, claim=Claim(Ledger(training.directory), 1))
        if hangs:
            rank.record_hang("no step for 3 s", StackPosition("wait in x.py:1", "the stack", waits=True))
        os._exit(1)

    monkeypatch.setattr(local, "run_rank", run_rank)
    monkeypatch.chdir(tmp_path)
    run = prepare(Composer().compose(["run_dir=R"]), ["python"])
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.dup2(writing, 2)
            os.close(writing)
            # not the captured one
            sys.stderr = os.fdopen(2, "w", buffering=1)
            launch_local(run)
        finally:
            os._exit(99)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        printed = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert printed.count("to resume: ") == 1, printed
    assert ("hpctrain: stacks: " in printed) == hangs
