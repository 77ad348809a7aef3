"""``sweep.json`` of a sweep's folder: how the sweep finds its runs, written by the command that makes or extends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.directory import RunDirectory

FIELDS: Mapping[str, tuple[type, ...]] = {
    "kind": (str,),
    "space": (dict,),
    "fixed": (list,),
    "folder": (str,),
    "submitted": (int, float),
    "command": (list,),
    "config_dir": (str, type(None)),
    "seed": (int, type(None)),
    "num_runs": (int, type(None)),
    "time_limit_min": (int, float, type(None)),
    "deadline": (int, float, type(None)),
    "min_steps": (int, type(None)),
    "reduction_factor": (int, type(None)),
    "sampler": (str, type(None)),
    "startup_runs": (int, type(None)),
    "program": (list, type(None)),
    "earlier": (list,),
}
"""Types of the fields in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """How a sweep finds its runs.

    Attributes:
        kind: ``grid``, ``random``, ``asha`` or ``optuna``.
        space: the keys with several values, with these as typed.
        fixed: the other overrides as typed.
        folder: the working directory of the command.
        submitted: when the sweep was made, in seconds since the epoch.
        command: as typed.
        config_dir: the folder of `--config-dir`, absolute; None without.
        seed: of the draws; None for a grid.
        num_runs: of all commands together; None for a grid, whose values decide it.
        time_limit_min: minutes from a command after which no further run begins; None without a limit.
        deadline: when those of the last command are over, in seconds since the epoch.
        min_steps: steps of asha's first rung.
        reduction_factor: of asha.
        sampler: of optuna.
        startup_runs: of optuna.
        program: the command of the runs, if they are of a program.
        earlier: spaces from which the first runs were drawn: ``{"space": ..., "num_runs": N}``, oldest first.
    """

    kind: str
    space: Mapping[str, str]
    fixed: Sequence[str]
    folder: str
    submitted: float
    command: Sequence[str]
    config_dir: str | None = None
    seed: int | None = None
    num_runs: int | None = None
    time_limit_min: float | None = None
    deadline: float | None = None
    min_steps: int | None = None
    reduction_factor: int | None = None
    sampler: str | None = None
    startup_runs: int | None = None
    program: Sequence[str] | None = None
    earlier: Sequence[Mapping[str, Any]] = field(default=())

    @classmethod
    def read(cls, home: RunDirectory | Path) -> SweepRecord | None:
        """Read the record of a sweep.

        Args:
            home: the sweep's folder.

        Returns:
            None for a sweep of an earlier version, for one of Hydra's sweepers, and for a folder that isn't a sweep's.

        Raises:
            RunDirectoryError: the file is damaged, or can't be read.
        """
        path = home.sweep if isinstance(home, RunDirectory) else RunDirectory.at(home).sweep
        remedy = "repair it; or remove it, and type the sweep's command again"
        try:
            found = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RunDirectoryError(f"{path}: can't be read ({error.strerror}); ask its owner") from error
        except RunDirectoryError as error:
            raise RunDirectoryError(f"{error}; {remedy}") from error
        given = {name: value for name, value in found.items() if name in FIELDS}  # a later version may add some
        try:
            record = cls(**given)
        except TypeError as error:
            missing = [one.name for one in dataclasses.fields(cls) if one.name not in found]
            raise RunDirectoryError(f"{path}: {missing[0]} is missing; {remedy}") from error
        for name, value in given.items():
            if not isinstance(value, FIELDS[name]) or isinstance(value, bool):
                raise RunDirectoryError(f"{path}: {name}={value!r} has the wrong type; {remedy}")
        return record

    def write(self, home: RunDirectory, mode: int) -> None:
        """Replace the record of a sweep, atomically.

        Args:
            home: the sweep's folder, which exists.
            mode: of the sweep's runs.
        """
        with home.permissions(mode):
            write_json(home.sweep, dataclasses.asdict(self))


def sweep_is_over(run: RunDirectory, now: float) -> bool:
    """Return whether the time of a run's sweep is over, so that the run may not begin.

    Args:
        run: any run; one of its own has no sweep.
        now: seconds since the epoch.
    """
    if not run.path.name.isdecimal():
        return False
    try:
        record = SweepRecord.read(RunDirectory(run.path.parent))
    except RunDirectoryError:  # a damaged record must not keep a run from its work
        return False
    return record is not None and record.deadline is not None and now >= record.deadline
