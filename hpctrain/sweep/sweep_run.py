"""Compose one run of a sweep."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpctrain.config.compose import Composer
from hpctrain.sweep.runs import SweepRun

YAML = {"True": "true", "False": "false", "None": "null"}


def sweep_run(composer: Composer, overrides: Sequence[str], fixed: Collection[str]) -> SweepRun:
    """Compose one run of a sweep.

    Args:
        composer: of the command line's folders.
        overrides: of the run.
        fixed: keys that don't vary.
    """
    own = without_hydra_overrides(overrides)
    pairs = [override.partition("=")[::2] for override in own]
    # Hydra writes a sweep's values as Python does, except those of a program
    texts = {key.lstrip("+"): value for key, value in pairs if key not in fixed}
    varied = {key: value if key.startswith("args.") else YAML.get(value, value) for key, value in texts.items()}
    return SweepRun(composer.compose_run(own), varied)


def without_hydra_overrides(overrides: Sequence[str]) -> list[str]:
    """Leave out the overrides that configure Hydra."""
    return [override for override in overrides if not override.lstrip("+~").startswith("hydra")]
