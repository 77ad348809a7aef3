"""What a sweep's command asks for, as its folder's ``sweep.json`` records it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override, ValueType

from hpctrain.config.compose import Composer
from hpctrain.config.compose_program import ProgramComposer
from hpctrain.config.multiple_values import value_as_typed
from hpctrain.config.overrides import OPEN_NODES
from hpctrain.config.sweep import Sweep, kind_of
from hpctrain.search.record import SweepRecord
from hpctrain.search.values import values_of

NOT_RECORDED = ("run_dir",)
"""Keys that the place of the record answers."""


def record_of(composer: Composer, search: Sweep, parsed: Sequence[Override], command: Sequence[str]) -> SweepRecord:
    """Make the record of a new sweep.

    Args:
        composer: of the command line's folders.
        search: the keys of the sweep.
        parsed: the other overrides.
        command: the command line as typed.
    """
    now = time.time()
    # the last one wins, as in `expand`
    last = {_key(override): override for override in parsed if not override.is_hydra_override()}
    space = {key: _text(override) for key, override in last.items() if override.is_sweep_override()}
    fixed = [
        key if override.is_delete() and "=" not in str(override.input_line) else f"{key}={value_as_typed(override)}"
        for key, override in last.items()
        if not override.is_sweep_override() and key not in NOT_RECORDED
    ]
    keys = ("seed", "num_runs", "min_steps", "reduction_factor", "sampler", "startup_runs")
    own = {name: getattr(search, name) for name in keys if hasattr(search, name)}
    return SweepRecord(
        kind=kind_of(search),
        space=space,
        fixed=fixed,
        folder=str(Path.cwd()),
        submitted=now,
        command=list(command),
        config_dir=None if composer.config_dir is None else str(Path(composer.config_dir).absolute()),
        time_limit_min=search.time_limit_min,
        deadline=deadline(search.time_limit_min, now),
        program=list(composer.command) if isinstance(composer, ProgramComposer) else None,
        **own,
    )


def deadline(time_limit_min: float | None, now: float) -> float | None:
    """Return when no further run begins, in seconds since the epoch; None without a limit."""
    return None if time_limit_min is None else now + 60 * time_limit_min


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
