"""Supervisors of a run of two nodes, with a fake SLURM."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from hpctrain.config.compose import Composer
from hpctrain.launch.launch_code import LaunchCode
from hpctrain.launch.prepare import prepare
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.scheduler.slurm import SILENCE_S, Slurm
from hpctrain.supervise.supervisor import STORAGE_S, Supervisor
from tests.unit.supervising import RUNNING


@pytest.fixture
def slurm(slurm):
    """A running job of two nodes."""
    slurm.job(RUNNING)
    slurm.nodes(("n1", "IDLE", 0), ("n2", "IDLE", 0))
    return slurm


@pytest.fixture(scope="session")
def composer():
    """Composes configurations."""
    return Composer()


@pytest.fixture
def supervisor(slurm, composer, tmp_path, monkeypatch):
    """Makes a supervisor of a run of two nodes that hpctrain submitted, or that its user's script made."""

    def make(*words: str, submitted: bool = True, copied: bool = False, run=slurm.run, **options: object) -> Supervisor:
        monkeypatch.setattr("hpctrain.supervise.supervisor.STORAGE_S", options.pop("storage_s", STORAGE_S))
        monkeypatch.setattr("hpctrain.supervise.job.SILENCE_S", options.pop("silence_s", SILENCE_S))
        variables = {name: str(options.pop(name)) for name in list(options) if name.startswith("SLURM_")}
        given = ["cluster=slurm", "nodes=2", "trainer.max_steps=80", f"run_dir={tmp_path}/run", *words]
        config = composer.compose(given)
        code = LaunchCode(RunDirectory.at(config.run_dir)) if copied else None
        plan = prepare(config, given, code=code)
        if submitted and not JobRecords(plan.directory).read():
            JobRecords(plan.directory).add({"job_id": "7", "time": time.time(), "log": "batch_7.log"})
        environ = slurm.environ | variables
        return Supervisor(plan, environ, Slurm(environ, run=run), **options)

    return make


@pytest.fixture
def without_space(monkeypatch):
    """Makes the first secret of an attempt fail, as on a full disk, where folders can still be made."""
    real, left = os.open, [1]

    def open_(path, *more, **options):
        if "secret" in str(path) and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *more, **options)

    monkeypatch.setattr(os, "open", open_)


@pytest.fixture
def unwritable(monkeypatch):
    """Makes so many claims fail, or all of them."""

    def make(times=None):
        real, left = Path.mkdir, [times]

        def mkdir(path, *more, **options):
            if path.parent.name == "attempts" and left[0] != 0:
                left[0] = left[0] and left[0] - 1
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, *more, **options)

        monkeypatch.setattr(Path, "mkdir", mkdir)

    return make
