"""The values of stored configurations, to compare hundreds of runs: unchecked, twenty times faster than `load`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hpctrain.config.identity import flat, flat_values
from hpctrain.config.root import Config
from hpctrain.config.stored import OPEN_GROUPS
from hpctrain.status.plain_config import read_plain_config


def stored_values(path: Path) -> dict[str, Any]:
    """Read the values of a ``config.yaml`` by their full keys; empty if it can't be read."""
    plain = read_plain_config(path)
    return _defaults() | flat_values(plain) if plain else {}


@functools.cache
def _defaults() -> dict[str, Any]:
    """The values of keys that an earlier version didn't store; the open groups have none."""
    return {key: value for key, value in flat(Config()).items() if key not in OPEN_GROUPS}
