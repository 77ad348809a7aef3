from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import Config
from hpctrain.errors import TaskError
from hpctrain.rank import rank as rank_module
from hpctrain.rank.classification import NCCL_ERRORS
from hpctrain.rank.rank import Member, Rank
from hpctrain.rank.stacks import StackPosition
from hpctrain.rank.stop_request import StopRequest
from hpctrain.run.config_change import change_config, keep_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import Collectives, ExitRecord, read_exit_records
from hpctrain.run.launcher import LauncherFacts, Owner
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.times import Times
from hpctrain.streams import open_log

SECOND_OF_TWO = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
}
HANG = "no step for 3 s", StackPosition("wait in x.py:1", "the stack", waits=True)


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory.at(tmp_path / "R")
    directory.create(0o750)
    return directory


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(rank_module, "PEERS_S", 0.0)

    def build(variables=SECOND_OF_TWO, *, attempt=1):
        environment = ClusterEnvironment.from_environment(variables)
        return Rank(Config(), environment, LauncherFacts(attempt=attempt), StopRequest(), Times(0.0))

    return build


def enter(rank, directory):
    ledger = Ledger(directory)
    rank.member = Member(environment=rank.environment, claim=Claim(ledger, ledger.claim()))


def test_a_rank_without_an_attempt_writes_nothing(make, tmp_path):
    rank = make()
    assert (rank.member, rank.stacks, rank.step, rank.progress) == (None, None, 0, None)
    rank.write_exit_record(Reason.FAILED, ValueError("early"))
    rank.record_hang(*HANG)
    rank.leave_world()
    rank.finish_writing()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_records_its_end_in_its_attempt(make, directory):
    rank = make()
    enter(rank, directory)
    rank.write_exit_record(Reason.FAILED, ValueError("wrong"), blames_peer=True)
    record = read_exit_records(directory.attempt(1))[1]
    assert (record.reason, record.message, record.blames_peer) == (Reason.FAILED, "ValueError: wrong", True)
    assert record.host == socket.gethostname()
    assert "ValueError: wrong" in record.traceback
    assert rank.description == f"rank 1 of 2 on {socket.gethostname()}, attempt 1, step 0"


def test_a_rank_records_what_its_log_lacks(make, directory):
    rank = make()
    enter(rank, directory)
    with open_log(Path("/dev/full")) as rank.log_stream:
        print("lost", file=rank.log_stream)
        rank.write_exit_record(Reason.COMPLETED)
    (record,) = read_exit_records(directory.attempt(1)).values()
    assert (record.lost_lines, record.lost_bytes) == (1, 5)


def test_the_record_of_an_error_of_hpctrain_is_one_line(make, directory):
    rank = make()
    enter(rank, directory)
    rank.write_exit_record(Reason.FAILED, TaskError("expected a scalar"))
    record = read_exit_records(directory.attempt(1))[1]
    assert (record.message, record.traceback) == ("TaskError: expected a scalar", "")


def test_a_file_system_that_refuses_the_exit_record_is_a_warning(make, directory, caplog):
    rank = make()
    rank.member = Member(environment=rank.environment, claim=Claim(Ledger(directory), 7))
    rank.write_exit_record(Reason.COMPLETED)
    assert "the exit record can't be written" in caplog.text


def test_a_hang_among_several_ranks_is_recorded_and_stacks_are_requested(make, directory):
    rank = make()
    enter(rank, directory)
    rank.record_hang(*HANG)
    record = read_exit_records(directory.attempt(1))[1]
    assert record.message == f"no step for 3 s; stacks: {directory.stacks(1, 1)}"
    assert (record.reason, record.traceback, record.blames_peer) == (Reason.HANG, "the stack", True)
    assert directory.stacks_request(1).exists()
    assert Ledger(directory).attempts() == [], "the launcher closes it"


class World:
    """Of which NCCL's part can't be had without GPUs."""

    def __init__(self, collectives=None):
        self.found = collectives
        self.calls = []

    def collectives(self):
        self.calls.append("collectives")
        return self.found

    def abort(self, *, process_ends):
        self.calls.append(process_ends)


def test_a_rank_whose_gpu_waits_for_nccl_waits_for_others_wherever_python_is(make, directory):
    rank = make()
    enter(rank, directory)
    rank.world = World(Collectives({"nccl default_pg": 7}, "nccl default_pg", "all_reduce", 7))
    rank.record_hang("no step for 3 s", StackPosition("tolist in meter.py:1", "the stack", waits=False))
    record = read_exit_records(directory.attempt(1))[1]
    assert (record.blames_peer, record.collectives) == (True, rank.world.found)


def test_a_rank_that_stands_still_with_all_its_collectives_finished_is_the_cause(make, directory):
    rank = make()
    enter(rank, directory)
    rank.world = World(Collectives({"nccl default_pg": 6}))
    rank.record_hang("no step for 3 s", StackPosition("read in data.py:1", "the stack", waits=False))
    assert not read_exit_records(directory.attempt(1))[1].blames_peer


def test_a_hang_is_recorded_before_the_device_is_asked(make, directory):
    class Stuck(World):
        def collectives(self):
            raise LookupError

    rank = make()
    enter(rank, directory)
    rank.world = Stuck()
    with pytest.raises(LookupError):
        rank.record_hang(*HANG)
    assert read_exit_records(directory.attempt(1))[1].reason is Reason.HANG


@pytest.mark.parametrize(
    ("error", "reason"), [("COMM_ERROR", Reason.INFRASTRUCTURE), ("TIMEOUT", Reason.HANG)], ids=str
)
def test_an_error_of_nccl_points_at_another_rank_and_a_save_is_finished_first(make, directory, capfd, error, reason):
    class Running:
        step, why_ended = 9, ""

        def finish_save_within(self, seconds):
            assert read_exit_records(directory.attempt(1))[1].reason is reason
            (directory.path / "saved").touch()

    rank = make()
    enter(rank, directory)
    rank.loop = Running()
    rank.record_communication_error(error)
    record = read_exit_records(directory.attempt(1))[1]
    assert (record.reason, record.blames_peer, record.step) == (reason, True, 9)
    assert record.message == NCCL_ERRORS[error]
    assert (directory.path / "saved").exists()
    assert f"attempt 1, step 9: {record.message}\n" in capfd.readouterr().err


def test_a_rank_leaves_its_communicators_to_the_end_of_its_process_unless_that_is_a_users(make):
    rank = make()
    rank.world = World()
    rank.leave_world()
    rank.program = object()
    rank.leave_world()
    assert rank.world.calls == [True, False]


def test_a_hang_in_the_launchers_own_process_closes_the_attempt(make, directory, capfd):
    rank = make({})
    enter(rank, directory)
    Owner.write(directory.attempt(1))
    rank.record_hang(*HANG)
    assert not read_exit_records(directory.attempt(1))[0].blames_peer, "a single rank has no peers"
    entry = Ledger(directory).attempts()[0]
    assert entry.reason is Reason.HANG
    assert f"to resume: python -m hpctrain resume {directory.path}\n" in capfd.readouterr().err
    assert Owner.read(directory.attempt(1)).pid == os.getpid()


@pytest.mark.parametrize("started", [False, True])
def test_a_hang_before_the_start_in_the_launchers_own_process_reverts_the_resumes_change(make, directory, started):
    rank = make({})
    enter(rank, directory)
    Owner.write(directory.attempt(1))
    directory.config.write_text("before")
    change_config(directory, "changed")
    if started:
        Ledger(directory).start(1, job_id=None, nodes=[], world_size=1, step=0)
        keep_config(directory)
    rank.record_hang(*HANG)
    (entry,) = Ledger(directory).attempts()
    assert (entry.start_step, entry.world_size, entry.reason) == (0, 1, Reason.HANG)
    assert directory.config.read_text() == ("changed" if started else "before")


def test_the_cause_is_the_rank_that_failed_first(make, directory):
    rank = make()
    enter(rank, directory)
    assert rank.wait_for_peer_cause(ask_for_stacks=False) is None
    ExitRecord(rank=0, host="n1", reason=Reason.FAILED, step=3, message="ValueError: theirs").write(
        directory.attempt(1)
    )
    rank.write_exit_record(Reason.INFRASTRUCTURE, RuntimeError("lost"), blames_peer=True)
    assert rank.wait_for_peer_cause(ask_for_stacks=False).message == "ValueError: theirs"
