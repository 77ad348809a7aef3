"""``sweep.json`` of a sweep's folder: how the sweep finds its runs, written by the command that makes or extends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hpctrain.config.sweep import MAX_RUNS, SAMPLERS
from hpctrain.errors import RunDirectoryError
from hpctrain.files import IrregularFileError, read_json, write_json
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import (
    COUNT,
    NUMBER,
    PATH,
    TEXT,
    TEXT_BY_NAME,
    TEXTS,
    TIME,
    FieldType,
    describe_wrong_field,
    field_types,
    list_of,
    up_to,
)

SWEEP_KEYS = ("seed", "num_runs", "min_steps", "reduction_factor", "sampler", "startup_runs")
"""Keys of the group `sweep` that the record of a sweep has under the same names."""
REMEDY = "repair it; or remove it, and type the sweep's command again"
"""What to do about a damaged record."""
_RUNS = up_to(MAX_RUNS)
_STEPS = FieldType("a whole number, 1 or more", lambda value: COUNT.accepts(value) and value >= 1)
_FACTOR = FieldType("a whole number, 2 or more", lambda value: COUNT.accepts(value) and value >= 2)
_SAMPLER = FieldType(f"one of {', '.join(SAMPLERS)}", lambda value: value in SAMPLERS)
_SPACES = list_of({"space": TEXT_BY_NAME, "num_runs": _RUNS}, ("space", "num_runs"))
_REQUIRED = ("kind", "space", "fixed", "folder", "submitted", "command")
_REQUIRED_OF_KIND = {
    "random": ("num_runs",),
    "asha": ("num_runs", "min_steps", "reduction_factor"),
    "optuna": ("num_runs", "sampler"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """The parameters by which a sweep finds its runs.

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

    kind: Annotated[str, TEXT]
    space: Annotated[Mapping[str, str], TEXT_BY_NAME]
    fixed: Annotated[Sequence[str], TEXTS]
    folder: Annotated[str, PATH]
    submitted: Annotated[float, TIME]
    command: Annotated[Sequence[str], TEXTS]
    config_dir: Annotated[str | None, PATH] = None
    seed: Annotated[int | None, COUNT] = None
    num_runs: Annotated[int | None, _RUNS] = None
    time_limit_min: Annotated[float | None, NUMBER] = None
    deadline: Annotated[float | None, NUMBER] = None
    min_steps: Annotated[int | None, _STEPS] = None
    reduction_factor: Annotated[int | None, _FACTOR] = None
    sampler: Annotated[str | None, _SAMPLER] = None
    startup_runs: Annotated[int | None, _RUNS] = None
    program: Annotated[Sequence[str] | None, TEXTS] = None
    earlier: Annotated[Sequence[Mapping[str, Any]], _SPACES] = ()

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
        try:
            record = read_json(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            remedy = REMEDY if isinstance(error, IrregularFileError) else "ask its owner"
            raise RunDirectoryError(f"{path}: can't be read ({error.strerror}); {remedy}") from error
        except RunDirectoryError as error:
            raise RunDirectoryError(f"{error}; {REMEDY}") from error
        required = (*_REQUIRED, *_REQUIRED_OF_KIND.get(str(record.get("kind")), ()))
        missing = next((f"{name} is missing" for name in required if record.get(name) is None), "")
        if mistake := missing or describe_wrong_field(record, field_types(SweepRecord)):
            raise RunDirectoryError(f"{path}: {mistake}; {REMEDY}")
        # a later version may add fields, and null stands for one that isn't there
        return cls(**{name: record[name] for name in field_types(SweepRecord) if record.get(name) is not None})

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
