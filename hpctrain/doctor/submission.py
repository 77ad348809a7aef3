"""Submit the doctor's job, with the request of a run."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from pathlib import Path

from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.config.stored import to_yaml
from hpctrain.doctor.asked import Asked
from hpctrain.doctor.folder import DoctorFolder
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.files import write_atomic
from hpctrain.launch.prepare import RunPlan, claim_default_path
from hpctrain.launch.submission import submit_doctor

TIME_LIMIT_MIN = 15
"""Time limit of the job: a short one starts sooner, and the checks take less than three minutes."""


def submit_examination(config: Config, asked: Asked) -> tuple[DoctorFolder, str]:
    """Make the folder of an examination, and submit its job; return both.

    Args:
        config: of the run that is to work, with cluster=slurm; `run_dir` names the folder, if it is set.
        asked: the words and flags of the command.

    Raises:
        RunDirectoryError: the folder isn't empty, or can't be written.
        HpctrainError: nothing was submitted.
    """
    if config.run_dir is not None and Path(config.run_dir).is_dir() and any(Path(config.run_dir).iterdir()):
        raise RunDirectoryError(f"run_dir={config.run_dir}: the folder isn't empty; name a new one for the doctor")
    path = Path(config.run_dir or claim_default_path("doctor")).absolute()
    stored = dataclasses.replace(config, name="doctor", run_dir=str(path))
    folder = DoctorFolder(path)
    folder.as_run.create_for_sweep(config.mode)
    with folder.as_run.permissions():
        for place in (folder.nodes, folder.ranks):
            place.mkdir(exist_ok=True)
        write_atomic(folder.request, to_yaml(stored))
        write_atomic(folder.token, secrets.token_hex(8))
        asked.write(folder)
    limited = dataclasses.replace(stored, cluster=_short(config.cluster))
    try:
        return folder, submit_doctor(RunPlan(limited, folder.as_run, resources_of(limited)))
    except ConfigError:  # SLURM refuses the job: the same command may be typed again
        shutil.rmtree(path, ignore_errors=True)
        raise


def _short(cluster: object) -> Slurm:
    """The request of a short job that isn't requeued: its command would wait for it a second time."""
    assert isinstance(cluster, Slurm)
    limit = min(TIME_LIMIT_MIN, cluster.time_limit_min)
    options = {name: value for name, value in cluster.sbatch.items() if name not in {"no_requeue", "no-requeue"}}
    sbatch = {**options, "requeue": False}
    return dataclasses.replace(cluster, time_limit_min=limit, signal_delay_s=0, sbatch=sbatch)
