"""A write is killed before each of its calls to the operating system; what is left must be complete or absent.

Run as a program with a folder, this file leaves there one run directory per kill: many processes, one import of torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from hpctrain.run.checkpoints import list_checkpoints, newest_intact
from hpctrain.run.directory import RunDirectory

CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")
NEXT = {"a new step": 3, "the same step again": 2}


def kill_before(number):
    """End this process by SIGKILL in place of its n-th call of any of `CALLS`, from whichever thread."""
    left = count(number, -1)

    def guarded(real):
        def call(*args, **kwargs):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, guarded(getattr(os, name)))


def snapshot(step, seed):
    import torch

    from hpctrain.checkpoint.rng import rng_state
    from hpctrain.checkpoint.state import Head, LiveState

    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return LiveState(
        model,
        {"": optimizer},
        head=Head(step=step, samples_seen=step, world_size=1, config_digest="c"),
        rng=[rng_state()],
    ).capture()


def save(directory, snapshot):
    """Write a checkpoint, and remove what is no longer kept."""
    from hpctrain.checkpoint.retention import Retention
    from hpctrain.checkpoint.write import CheckpointWriter
    from hpctrain.config.checkpoint import Checkpoint
    from hpctrain.run.ledger import Claim, Ledger

    ledger = Ledger(directory)
    claim = Claim(ledger, ledger.last_claim())
    CheckpointWriter(directory, claim).write(snapshot)
    Retention(directory, claim, Checkpoint()).apply(snapshot.step)


def main(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    start = RunDirectory.at(folder / "start")
    start.create(0o750)
    for step in (1, 2):
        save(start, snapshot(step, seed=step))
    for name, step in NEXT.items():
        new = snapshot(step, seed=9)
        for number in count():
            directory = RunDirectory.at(folder / name / f"{number:03d}")
            shutil.copytree(start.path, directory.path)
            child = os.fork()
            if child == 0:
                kill_before(number)
                save(directory, new)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, __file__, folder], check=True, timeout=200)
    return {name: [RunDirectory.at(path) for path in sorted((folder / name).iterdir())] for name in NEXT}


def digests(directory):
    return {info.step: info.weights_digest for info in list_checkpoints(directory)}


def test_a_new_checkpoint_is_complete_or_absent_and_two_intact_are_always_there(killed):
    *runs, finished = killed["a new step"]
    assert [info.step for info in list_checkpoints(finished)] == [2, 3]
    seen = set()
    for directory in runs:
        infos = list_checkpoints(directory)
        assert all(info.intact for info in infos), directory
        seen.add(tuple(info.step for info in infos))
    assert seen == {(1, 2), (1, 2, 3), (2, 3)}
    assert len(runs) > 30


def test_a_resume_finds_the_newest_and_cleaning_leaves_checkpoints_alone(killed):
    from hpctrain.checkpoint.retention import remove_leftovers

    for directory in killed["a new step"]:
        before = digests(directory)
        remove_leftovers(directory)
        assert digests(directory) == before
        assert all(path.name.startswith("step_") for path in directory.checkpoints.iterdir())
        found, damaged = newest_intact(directory)
        assert found is not None
        assert (found.step, damaged) == (max(before), [])


def test_replacing_a_checkpoint_leaves_the_old_or_the_new_one(killed):
    from hpctrain.checkpoint.retention import remove_leftovers

    *runs, finished = killed["the same step again"]
    old, new = digests(runs[0])[2], digests(finished)[2]
    seen = []
    for directory in runs:
        remove_leftovers(directory)
        assert all(info.intact for info in list_checkpoints(directory)), directory
        assert sorted(path.name for path in directory.checkpoints.iterdir()) == ["step_00000001", "step_00000002"]
        seen.append(digests(directory)[2])
    assert set(seen) == {old, new}
    assert old != new


def test_the_next_write_succeeds_after_any_of_these_kills(killed):
    from hpctrain.checkpoint.retention import remove_leftovers

    for directory in killed["a new step"][::7]:
        remove_leftovers(directory)
        save(directory, snapshot(4, seed=4))
        assert [info.intact for info in list_checkpoints(directory)] == [True, True]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
