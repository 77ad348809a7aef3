"""Compose the group `sweep` of a command, whose keys aren't part of a run's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from hpctrain.config.compose import Composer
from hpctrain.config.multiple_values import value_as_typed
from hpctrain.config.schema import SWEEP_GROUP
from hpctrain.config.sweep import KINDS, Sweep
from hpctrain.errors import ConfigError
from hpctrain.phrases import either

GRID = "; the values of a grid decide how many runs it has"


class SweepComposer(Composer):
    """Composes the group `sweep` from ``conf/sweep.yaml``; see `Composer`."""

    primary = "sweep"
    foreign = frozenset()
    sweeps = False

    def compose_sweep(self, overrides: Sequence[str]) -> Sweep:
        """Compose and check the keys of the sweep.

        Args:
            overrides: those of `sweep` alone, as typed.

        Raises:
            ConfigError: an option, a key or a value is invalid.
        """
        parsed = self.parse(overrides)
        chosen = [str(one.value()) for one in parsed if one.key_or_group == SWEEP_GROUP]
        for override in parsed:
            if override.get_key_element() != override.key_or_group:
                word, _, value = str(override.input_line).partition("=")
                raise ConfigError(word, value, "must not begin with + or ~", f"write {SWEEP_GROUP}.KEY=VALUE")
            _refuse_key_of_others(override, chosen[-1] if chosen else "grid")
        with self.explaining(overrides):
            sweep = OmegaConf.to_object(self._raw(overrides)[SWEEP_GROUP])
        assert isinstance(sweep, Sweep)
        return sweep

    def _fill_in(self, node: DictConfig, task: str) -> None:
        """The keys of a sweep have no such defaults."""


def split_sweep(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command's overrides into those of the sweep and those of its runs."""
    own = [override for override in overrides if is_of_sweep(override)]
    return own, [override for override in overrides if not is_of_sweep(override)]


def is_of_sweep(override: str) -> bool:
    """Whether an override as typed is of the group `sweep`."""
    return override.lstrip("+~").partition("=")[0].partition(".")[0] == SWEEP_GROUP


def kinds_with(name: str) -> list[str]:
    """Return the kinds of sweeps that have a key, named without `sweep.`; all of them for a common key."""
    return [kind for kind, schema in KINDS.items() if name in {field.name for field in dataclasses.fields(schema)}]


def _refuse_key_of_others(override: Override, chosen: str) -> None:
    owners = kinds_with(override.key_or_group.removeprefix(f"{SWEEP_GROUP}."))
    if owners and chosen in KINDS and chosen not in owners:
        grid_counts = chosen == "grid" and override.key_or_group.endswith(".num_runs")
        problem = f"exists only with {SWEEP_GROUP}={either(owners)}{GRID if grid_counts else ''}"
        raise ConfigError(override.key_or_group, value_as_typed(override), problem, f"add {SWEEP_GROUP}={owners[0]}")
