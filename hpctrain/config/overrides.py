"""Overrides `KEY=VALUE` in Hydra's grammar, applied to a configuration that is composed or stored already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hpctrain.config.explain import HELP, Explainer
from hpctrain.config.multiple_values import in_brackets, require_single_value, value_as_typed
from hpctrain.config.override_texts import TextKeepingParser, as_texts
from hpctrain.errors import ConfigError

MISTAKES = (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError)
"""What composing raises for mistakes on the command line and in configuration files."""

OPEN_NODES = re.compile(r"^(args|cluster\.(env|sbatch|container\.env)|optimizer\.named|logger\.mlflow\.tags)([.=])")
"""Keys whose names the user chooses; here new names need no plus sign, which Hydra requires elsewhere."""


def open_overrides(overrides: Sequence[str]) -> list[str]:
    """Add the plus signs to overrides of `OPEN_NODES`, and the brackets to names of runs."""
    return [f"++{override}" if OPEN_NODES.match(override) else in_brackets(override) for override in overrides]


def apply_overrides(node: DictConfig, overrides: Sequence[str], *, as_typed: bool = False) -> None:
    """Apply overrides of values, as they are typed, to a stored configuration.

    Args:
        node: of the configuration.
        overrides: as typed.
        as_typed: store the texts of `args` instead of their values.

    Raises:
        ConfigError: one can't be parsed, has several values, or names an unknown key.
    """
    parser = TextKeepingParser.create()
    for typed, override in zip(overrides, open_overrides(overrides), strict=True):
        try:
            for parsed in parser.parse_overrides([override]):
                single = require_single_value(parsed, sweeps=False)
                apply_override(as_texts(single) if as_typed else single, node)
        except MISTAKES as error:
            text = "\n".join(filter(None, (str(error), str(error.__cause__ or ""))))
            raise Explainer(text, [typed], lambda: sorted(keys_of(node))).explain() from error


def apply_override(override: Override, node: DictConfig) -> None:
    """Apply one override of a value.

    Raises:
        ConfigError: OmegaConf fails on the value. Other mistakes raise `MISTAKES`.
    """
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], node)
    except MISTAKES:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # OmegaConf fails in its own code on some values, such as a list for a group
        problem = f"can't be used here: {error}"
        raise ConfigError(override.key_or_group, value_as_typed(override), problem, HELP) from error


def keys_of(node: Any, prefix: str = "") -> list[str]:
    """Return the full names of all keys, groups included."""
    keys = [prefix] if prefix else []
    if isinstance(node, DictConfig) and not node._is_none():
        for key in node:
            name = str(key)
            keys += keys_of(node._get_node(name), f"{prefix}.{name}" if prefix else name)
    return keys
