"""Hydra composes each choice of options once in a process: most of what a command takes that starts no training.

hpctrain has Hydra compose the options that were chosen, and applies values itself: commands of hundreds of tests choose
the same few. Folders of a test's own are composed each time.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.types import RunMode

HYDRAS_OWN = Hydra.compose_config
COMPOSED: dict[Any, bytes] = {}
"""What Hydra composed, pickled."""


def compose_once(self: Hydra, config_name: str, overrides: Sequence[str], run_mode: RunMode, **options: Any) -> Any:
    """Stands in for `Hydra.compose_config`."""
    places = [(source.provider, source.path) for source in self.config_loader.get_sources()]
    if any(provider in ("command-line", "working-directory") for provider, _ in places):
        return HYDRAS_OWN(self, config_name, list(overrides), run_mode, **options)
    key = (tuple(places), config_name, tuple(overrides), run_mode, tuple(sorted(options.items())))
    if key not in COMPOSED:
        COMPOSED[key] = pickle.dumps(HYDRAS_OWN(self, config_name, list(overrides), run_mode, **options))
    return pickle.loads(COMPOSED[key])
