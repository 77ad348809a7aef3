"""Whatever happens to senders, a service gets each row once, and none that a resume could change."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.growing_file import GrowingFile
from hpctrain.run.launcher import Owner
from hpctrain.run.reason import Reason
from hpctrain.sync import transfer as transfers
from hpctrain.sync.sender import BusyError, Cursor, SenderClaim, cursor_path
from hpctrain.sync.sent_run import identify
from hpctrain.sync.service import ServiceError, ServiceSetupError
from hpctrain.sync.transfer import Transfer, send_once
from tests.support.fake_service import FakeService
from tests.support.logged_run import LoggedRun

KINDS = (True, False)


@pytest.fixture
def run(directory):
    return LoggedRun(directory)


@pytest.fixture(params=KINDS, ids=["as W&B", "as MLflow"])
def service(tmp_path, request):
    """Makes clients of one service."""
    return lambda **options: FakeService(tmp_path / "service", asks_at_open=request.param, **options)


def send(run, made, **options):
    return send_once(Transfer(directory=run.directory, service="wandb", make_client=lambda *_, **__: made, **options))


def steps(made):
    return [row["step"] for row in made.arrived()]


def test_only_what_lies_before_the_newest_checkpoint_is_sent_and_the_rest_once_the_run_is_completed(run, service):
    run.train(0, 20)
    run.train(20, 27, save=False)
    made = service()
    assert send(run, made) == ExitCode.FINISHED
    assert steps(made) == list(range(1, 20))
    run.train(20, 30)
    run.end(Reason.COMPLETED, 30)
    send(run, made)
    assert made.arrived() == run.logged()
    assert steps(made) == list(range(1, 31))
    cursor = Cursor.read(run.directory, "wandb")
    assert (cursor.confirmed_step, cursor.complete, cursor.state) == (30, True, "completed")


def test_the_records_of_a_step_are_one_row_with_its_media(run, service):
    run.train(0, 6, media=True)
    made = service()
    send(run, made)
    (row,) = [row for row in made.arrived() if row["step"] == 5]
    assert row == {"step": 5, "train/loss": 0.2, "train/lr": 0.5, "eval/loss": 0.4, "media": ["eval/sample"]}


def test_a_file_outside_of_the_runs_media_is_not_sent(run, service):
    run.train(0, 6, media=True)
    records = run.directory.media_records
    records.write_text(records.read_text().replace("media/eval/sample_00000005.txt", "../../../etc/passwd"))
    made = service()
    send(run, made)
    assert not any("media" in row for row in made.arrived())


def test_a_run_that_goes_on_after_it_was_completed_goes_on_at_the_service(run, service):
    run.train(0, 10)
    run.end(Reason.COMPLETED, 10)
    first, second = service(), service()
    send(run, first)
    run.train(10, 20)
    run.end(Reason.COMPLETED, 20)
    send(run, second)
    assert second.arrived() == run.logged()
    assert first.opened_with == [""]
    assert second.opened_with == [Cursor.read(run.directory, "wandb").run_id]


def test_nothing_is_opened_if_there_is_nothing_to_send(run, service, capsys):
    run.train(0, 10)
    run.end(Reason.COMPLETED, 10)
    send(run, service())
    again = service()
    assert send(run, again) == ExitCode.FINISHED
    assert again.opened_with == []
    assert "nothing to send, up to step 10; the run is completed" in capsys.readouterr().out


def test_all_sends_the_end_of_a_run_that_stopped_and_a_resume_doubles_nothing(run, service, capsys):
    run.train(0, 10)
    run.train(10, 17, save=False)
    run.end(Reason.FAILED, 17)
    made = service()
    send(run, made)
    assert "what was logged from step 10 on lies after the newest checkpoint; --all sends it" in capsys.readouterr().out
    send(run, made, everything=True)
    assert steps(made) == list(range(1, 18))
    run.train(10, 25)
    run.end(Reason.COMPLETED, 25)
    send(run, made)
    assert steps(made) == list(range(1, 26))


@pytest.mark.parametrize("damage", [b"", b'{"confirmed_step": 5', b'{"confirmed_step": "five"}', None])
def test_a_cursor_that_is_torn_or_lost_costs_nothing(run, service, damage):
    run.train(0, 10)
    made = service()
    send(run, made)
    path = cursor_path(run.directory, "wandb")
    path.unlink() if damage is None else path.write_bytes(damage)
    run.train(10, 20)
    run.end(Reason.COMPLETED, 20)
    again = service()
    send(run, again)
    assert again.arrived() == run.logged()


def test_another_destination_gets_the_whole_run(run, service, tmp_path):
    run.train(0, 10)
    send(run, service())
    other = service()
    other.path = tmp_path / "other"
    run.train(10, 20)
    run.end(Reason.COMPLETED, 20)
    send(run, other)
    assert other.arrived() == run.logged()
    back = service()
    send(run, back)
    assert back.arrived() == run.logged()
    assert Cursor.read(run.directory, "wandb").destination == str(back.path)


def test_a_run_that_was_removed_at_the_service_is_sent_anew(run, service):
    run.train(0, 10)
    made = service()
    send(run, made)
    made.path.unlink()
    run.train(10, 20)
    send(run, service())
    assert steps(made) == list(range(1, 20))


def test_a_copy_of_a_run_is_a_run_of_its_own_at_the_service(run, service, tmp_path):
    run.train(0, 10)
    send(run, service())
    shutil.copytree(run.directory.path, tmp_path / "copy")
    copy = LoggedRun.at(RunDirectory.at(tmp_path / "copy"))
    run.train(10, 20)
    copy.train(10, 30)
    send(run, service())
    of_copy = service()
    of_copy.path = tmp_path / "run of the copy"
    send(copy, of_copy)
    assert of_copy.opened_with == [""]
    assert steps(of_copy) == list(range(1, 30))
    first, second = (Cursor.read(made.directory, "wandb") for made in (run, copy))
    assert first.run_id != second.run_id
    assert (first.digest, second.digest) == (identify(run.directory), identify(copy.directory))


def test_a_moved_run_continues_at_the_service(run, service, tmp_path):
    run.train(0, 10)
    send(run, service())
    run_id = Cursor.read(run.directory, "wandb").run_id
    run.directory.path.rename(tmp_path / "moved")
    moved = LoggedRun.at(RunDirectory.at(tmp_path / "moved"))
    moved.train(10, 20)
    made = service()
    send(moved, made)
    assert made.opened_with == [run_id]
    assert (steps(made), Cursor.read(moved.directory, "wandb").run_id) == (list(range(1, 20)), run_id)


def test_a_sender_killed_at_step_zero_leaves_it_in_doubt(run, service):
    run.train(0, 1)
    run.directory.metrics.write_text('{"step": 0, "eval/loss": 1}\n{"step": 1, "eval/loss": 1}\n')
    run.end(Reason.COMPLETED, 1)
    run.directory.sync.mkdir()
    Cursor(run_id="x", handed_over_step=0).write(run.directory, "wandb")
    made = service()
    made.path.write_text('{"step": 0, "eval/loss": 1}\n')
    send(run, made)
    assert steps(made) == [0, 1]


def test_a_service_that_refuses_is_recorded_and_gets_the_rest_later(run, service):
    run.train(0, 20)
    run.end(Reason.COMPLETED, 20)
    for refuses_after in (0, 7):
        made = service(refuses_after=refuses_after)
        with pytest.raises(ServiceError, match=r"401|503"):
            send(run, made)
        assert made.states == ["abandoned"]
        assert Cursor.read(run.directory, "wandb").problem.startswith(("401", "503"))
    made = service()
    send(run, made)
    assert made.arrived() == run.logged()
    assert Cursor.read(run.directory, "wandb").problem == ""


def test_a_run_that_trains_cannot_be_sent_beyond_its_checkpoint(run, service):
    run.train(0, 10)
    Owner.write(run.directory.attempt(run.attempt))
    with pytest.raises(RunDirectoryError, match="--all is for runs that have stopped"):
        send(run, service(), everything=True)


def test_two_senders_at_once_are_one(run, service):
    run.train(0, 10)
    run.end(Reason.COMPLETED, 10)
    claim = SenderClaim(run.directory, "wandb")
    claim.acquire()
    with pytest.raises(BusyError, match=f"process {os.getpid()} on this machine is already sending it"):
        send(run, service())
    claim.release()
    made = service()
    send(run, made)
    assert made.arrived() == run.logged()


def test_a_claim_that_could_not_be_given_back_does_not_block_its_own_process(run, monkeypatch):
    claim, later = SenderClaim(run.directory, "wandb"), SenderClaim(run.directory, "wandb")
    claim.acquire()

    def fail(_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", fail)
        claim.release()
    later.acquire()
    with pytest.raises(BusyError, match=f"process {os.getpid()} on this machine is already sending it"):
        SenderClaim(run.directory, "wandb").acquire()
    later.release()


def test_a_sender_that_was_taken_for_dead_stops(run, service, monkeypatch):
    run.train(0, 10)
    run.end(Reason.COMPLETED, 10)
    made = service()
    opened = made.open

    def overtaken(*arguments):
        later = run.directory.sync / "wandb_claims" / "000002"
        later.mkdir()
        (later / "owner.json").write_text("{}")
        return opened(*arguments)

    monkeypatch.setattr(made, "open", overtaken)
    with pytest.raises(BusyError, match="another process took over"):
        send(run, made)
    assert made.arrived() == []


def test_a_run_is_followed_to_its_end_while_the_service_fails_now_and_then(run, service, capsys):
    run.train(0, 10)
    Owner.write(run.directory.attempt(run.attempt))
    made = [service(), service(refuses_after=3), service(), service()]
    attempts = iter(made)

    def elapse(_):
        # the run goes on while the follower sleeps
        last = run.logged()[-1]["step"]
        if last < 30:
            run.train(last, last + 10)
            Owner.write(run.directory.attempt(run.attempt))
        else:
            run.end(Reason.COMPLETED, last)

    transfer = Transfer(directory=run.directory, service="wandb", make_client=lambda *_, **__: next(attempts))
    assert transfers.follow(transfer, elapse) == ExitCode.FINISHED
    assert made[0].arrived() == run.logged()
    out = capsys.readouterr().out
    assert "503: come back later; trying again in 10 s" in out
    assert out.splitlines()[-1].endswith("W&B: the run is completed")


def test_following_reads_each_record_once(run, service, monkeypatch):
    num_read, read = [], GrowingFile.read_lines
    monkeypatch.setattr(
        GrowingFile, "read_lines", lambda file: (num_read.append(len((found := read(file)).lines)), found)[1]
    )
    run.train(0, 10)
    Owner.write(run.directory.attempt(run.attempt))
    pauses = []

    def elapse(s):
        pauses.append(s)
        if len(pauses) == 3:
            run.end(Reason.COMPLETED, 10)

    transfer = Transfer(directory=run.directory, service="wandb", make_client=lambda *_, **__: service())
    transfers.follow(transfer, elapse)
    assert sum(num_read) == len(run.directory.metrics.read_text().splitlines())
    assert service().arrived() == run.logged()


def test_what_its_user_has_to_mend_is_not_tried_again(run, monkeypatch):
    run.train(0, 10)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ServiceSetupError, match="W&B needs the package wandb"):
        transfers.follow(Transfer(directory=run.directory, service="wandb"), sleep=pytest.fail)


@pytest.mark.parametrize("kind", KINDS, ids=["as W&B", "as MLflow"])
def test_senders_killed_anywhere_double_and_miss_nothing(directory, tmp_path, kind):
    run, chance = LoggedRun(directory), random.Random(7)
    made = FakeService(tmp_path / "service", asks_at_open=kind)
    end = 0
    for _ in range(12):
        # an attempt that dies after its last checkpoint, now and then; the next one repeats those steps
        if chance.random() < 0.5:
            run.train(end, end + 60, save=False)
        run.train(end, end + 40)
        end += 40
        for _ in range(2):
            _killed(run, tmp_path, kind, after_s=chance.uniform(0.001, 0.03))
    run.end(Reason.COMPLETED, end)
    send(run, made)
    assert [row["step"] for row in made.arrived()] == list(range(1, end + 1))
    assert made.arrived() == run.logged()


def _killed(run, tmp_path, kind, *, after_s):
    """Send in a process of its own, and kill it."""
    pid = os.fork()
    if not pid:
        try:
            send(run, FakeService(tmp_path / "service", asks_at_open=kind, pause_s=0.0003))
        finally:
            os._exit(0)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_claim_of_another_machine_is_void_once_it_is_not_touched(run, service):
    run.train(0, 10)
    claim = SenderClaim(run.directory, "wandb")
    claim.acquire()
    owner = run.directory.sync / "wandb_claims" / "000001" / "owner.json"
    owner.write_text(json.dumps({"host": "elsewhere", "pid": 5}))
    with pytest.raises(BusyError, match="process 5 on elsewhere is already sending it, as of 0 s ago"):
        SenderClaim(run.directory, "wandb").acquire()
    old = time.time() - 100
    os.utime(owner, (old, old))
    later = SenderClaim(run.directory, "wandb")
    later.acquire()
    with pytest.raises(BusyError):
        claim.require()
    later.require()
    claim.release()
    later.release()


@pytest.mark.parametrize("number", [1, 2])
def test_a_sender_whose_unfinished_claim_another_one_removes_finds_the_run_busy(run, monkeypatch, number):
    folder, write = run.directory.sync / "wandb_claims", Owner.write

    def overtaken(made):
        (folder / f"{number:06d}").mkdir()
        shutil.rmtree(made)
        write(made)

    monkeypatch.setattr(Owner, "write", overtaken)
    with pytest.raises(BusyError, match="another process has just begun to send it"):
        SenderClaim(run.directory, "wandb").acquire()
    assert [path.name for path in folder.iterdir()] == [f"{number:06d}"]


def test_a_claim_on_a_full_disk_is_not_called_busy(run, monkeypatch):
    def full(_made):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Owner, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        SenderClaim(run.directory, "wandb").acquire()
    assert list((run.directory.sync / "wandb_claims").iterdir()) == []


def test_a_sender_whose_look_at_a_claim_another_one_overtakes_finds_the_run_busy(run, monkeypatch):
    folder, touch = run.directory.sync / "wandb_claims", Path.touch
    (folder / "000001").mkdir(parents=True)

    def overtaken(path):
        touch(path)
        path.unlink()
        (folder / "000002" / "file").mkdir(parents=True)

    monkeypatch.setattr(Path, "touch", overtaken)
    with pytest.raises(BusyError, match="another process has just begun to send it"):
        SenderClaim(run.directory, "wandb").acquire()
