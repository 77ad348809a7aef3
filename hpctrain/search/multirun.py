"""`-m`: compose and check every run of a sweep, then launch them, or let a sweeper such as Optuna's choose them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override, ValueType

from hpctrain.config.compose import Composer, ProgramComposer, SweepComposer, split_sweep
from hpctrain.config.overrides import NOT_SWEPT, OPEN_NODES, refuse_ambiguous_gres, value_as_typed
from hpctrain.config.sweep import Grid, kind_of
from hpctrain.config.sweep import Sweep as SweepOptions
from hpctrain.errors import ConfigError, ExitCode
from hpctrain.run.directory import RunDirectory
from hpctrain.run.launch_mark import LaunchMark
from hpctrain.run.sweep_record import SWEEP_KEYS, SweepRecord
from hpctrain.search.distribution import values_of
from hpctrain.search.search import algorithm_of, is_search
from hpctrain.search.sweep import Sweep, require_one_cluster, sweep_home


def multirun(composer: Composer, overrides: Sequence[str], command: Sequence[str]) -> int:
    """Launch a sweep.

    Args:
        composer: of the command line's folders.
        overrides: with comma-separated values, ranges and so on, as Hydra's sweeper takes them.
        command: the command line as typed.

    Returns:
        An `ExitCode`: 0 if all runs finished or were submitted, else that of the first run that didn't finish.

    Raises:
        ConfigError: a run's configuration is invalid; nothing is launched or written then.
    """
    sweep_overrides, overrides = split_sweep(overrides)
    # most sweeps are grids without keys of their own, and composing takes a tenth of a second
    search = SweepComposer(composer.config_dir).compose_sweep(sweep_overrides) if sweep_overrides else Grid()
    _refuse_swept(composer, overrides)
    sweeper = composer.sweeper(overrides)
    if not re.fullmatch(r"hydra\..*\.BasicSweeper", str(sweeper.get("_target_"))):
        from hpctrain.search.hydra_sweeper import chosen_sweeper, run_sweeper

        if sweep_overrides:
            remedy = f"leave out {sweep_overrides[0]}, or the sweeper"
            raise ConfigError(
                "hydra/sweeper", chosen_sweeper(overrides), "a sweeper of Hydra finds the runs by itself", remedy
            )
        return run_sweeper(composer, overrides, command)
    # in place of Hydra's basic sweeper, which would launch batch by batch, and write its own files
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    _refuse_swept(composer, params)
    with composer.explaining(overrides):
        parsed = composer.parse([*params, *overrides])
        record = record_of(composer, search, parsed, command)
        composed = algorithm_of(record).compose(composer, parsed)
    require_one_cluster([run.config for run in composed.runs])
    with sweep_home(composed.runs[0].config) as home:
        _refuse_other_sweep(home, composed.record)
        codes = Sweep(home, command, record=composed.record).launch_composed(composed)
    return next((code for code in codes if code != ExitCode.FINISHED), ExitCode.FINISHED)


def record_of(
    composer: Composer, options: SweepOptions, parsed: Sequence[Override], command: Sequence[str]
) -> SweepRecord:
    """Make the record of a new sweep.

    Args:
        composer: of the command line's folders.
        options: the keys of the sweep.
        parsed: the other overrides.
        command: the command line as typed.
    """
    now, limit_min = time.time(), options.time_limit_min
    # the last one wins, as in `expand`
    last = {_key(override): override for override in parsed if not override.is_hydra_override()}
    space = {key: _text(override) for key, override in last.items() if override.is_sweep_override()}
    # the place of the record is the answer to run_dir
    fixed = [
        key if override.is_delete() and "=" not in str(override.input_line) else f"{key}={value_as_typed(override)}"
        for key, override in last.items()
        if not override.is_sweep_override() and key != "run_dir"
    ]
    sweep_options = {name: getattr(options, name) for name in SWEEP_KEYS if hasattr(options, name)}
    return SweepRecord(
        kind=kind_of(options),
        space=space,
        fixed=fixed,
        folder=str(Path.cwd()),
        submitted=now,
        command=list(command),
        config_dir=None if composer.config_dir is None else str(Path(composer.config_dir).absolute()),
        time_limit_min=limit_min,
        deadline=None if limit_min is None else now + 60 * limit_min,
        program=list(composer.command) if isinstance(composer, ProgramComposer) else None,
        **sweep_options,
    )


def _text(override: Override) -> str:
    """The values as typed; options of a group instead of a pattern, whose meaning depends on the folders searched."""
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return ",".join(values_of(override))
    return value_as_typed(override)


def _key(override: Override) -> str:
    """The key as it is typed: `open_overrides` adds plus signs to some."""
    key = override.get_key_element()
    bare = key.removeprefix("++")
    return bare if OPEN_NODES.match(f"{bare}=") else key


def _refuse_swept(composer: Composer, overrides: Sequence[str]) -> None:
    for override in composer.parse(overrides):
        key = override.key_or_group
        if key in NOT_SWEPT and override.is_sweep_override():
            raise ConfigError(key, value_as_typed(override), "can't be swept over", NOT_SWEPT[key])
        refuse_ambiguous_gres(override)


def _refuse_other_sweep(home: RunDirectory, record: SweepRecord) -> None:
    """Refuse a command in the folder of another sweep, whose runs it would mix with its own.

    Raises:
        ConfigError: the folder has a search, or draws of another space or seed.
    """
    there = SweepRecord.read(home)
    if there is None or there.kind == record.kind == "grid":
        return
    is_same = (there.kind, there.space, there.seed) == (record.kind, record.space, record.seed)
    is_unfinished = bool(LaunchMark(home).describe_unfinished())
    if is_same and (is_unfinished or not is_search(there)) and not there.earlier:
        return
    difference = ""
    if not is_same and there.kind == record.kind:
        difference = f" with sweep.seed={there.seed}" if there.space == record.space else " of other values"
    remedy = f"choose another run_dir, or continue the one there: python -m hpctrain resume {home.as_typed}"
    hint = "" if there.kind == "grid" else ", with sweep.num_runs=N for more runs"
    raise ConfigError("run_dir", str(home.path), f"already has a sweep={there.kind}{difference}", f"{remedy}{hint}")
