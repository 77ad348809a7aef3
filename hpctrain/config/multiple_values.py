"""Overrides with several values: only a sweep accepts them, except for keys that SLURM itself takes as lists."""

from __future__ import annotations

import dataclasses
import re

from hydra.core.override_parser.types import Override, ValueType

from hpctrain.config.schema import GROUPS, LIST_GROUPS, SWEEP_GROUP
from hpctrain.errors import ConfigError

TAKES_COMMAS = re.compile(r"after|cluster\.(partition|exclude|constraint|reservation|qos|network_interface|sbatch\..+)")
"""Keys whose values may be comma-separated lists: runs, SLURM's options, and the interfaces of gloo and NCCL."""
NOT_SWEPT = {
    "cluster": "type one command for each",
    "cluster.kind": "type one command for each",
    "cluster.wait": "type one command for each",
    "cluster.dry_run": "type one command for each",
    "run_dir": "runs are RUN_DIR/0, RUN_DIR/1, ...",
}
"""Keys that decide how a sweep itself is launched, and what to do instead of sweeping over them."""


def takes_as_list(override: Override) -> bool:
    """Return whether several values are one for this key: a list, unquoted, that SLURM takes as it is typed."""
    is_list = override.value_type is ValueType.SIMPLE_CHOICE_SWEEP and not re.search("['\"]", value_as_typed(override))
    return is_list and TAKES_COMMAS.fullmatch(override.key_or_group) is not None


def require_single_value(override: Override, *, sweeps: bool = True) -> Override:
    """Return the override with one value, for a command that doesn't sweep.

    Args:
        override: parsed.
        sweeps: whether the command can sweep, with -m.

    Raises:
        ConfigError: it has several, such as `a,b` or `range(1,3)`.
    """
    if not override.is_sweep_override():
        return override
    key, typed = override.key_or_group, value_as_typed(override)
    is_list = override.value_type is ValueType.SIMPLE_CHOICE_SWEEP and not re.search("['\"]", typed)
    if takes_as_list(override):
        # as typed: Hydra reads the items as numbers where it can, and would drop the zeros of 007
        return dataclasses.replace(override, value_type=ValueType.ELEMENT, _value=typed)
    remedies = ["add -m to sweep over them"] if sweeps and key not in NOT_SWEPT else []
    if key in LIST_GROUPS:
        remedies += [f"write {key}=[{typed}] to choose them all"]
    elif key in GROUPS:
        remedies += ["choose one option"]
    elif is_list and not key.startswith(f"{SWEEP_GROUP}."):  # none of a sweep's keys takes a text or a list
        remedies += [f"write {key}='\"{typed}\"' for a string, {key}=[{typed}] for a list"]
    raise ConfigError(key, typed, "has several values", ", or ".join(remedies or ["write one value"]))


def in_brackets(override: str) -> str:
    """Write the names of runs as the list that the key has, with quotes: Hydra would read some names as numbers.

    So they are a list in a sweep too, where Hydra takes `KEY=A,B` for two values.
    """
    key, is_given, value = override.partition("=")
    if key.lstrip("+") != "after" or not is_given or re.search(r"[\[({$]", value):
        return override
    if re.search(r"['\"\\]", value):
        return f"{key}=[{value}]"
    names = [] if value.strip() in ("", "null") else value.split(",")
    return f"{key}=[{','.join(repr(name.strip()) for name in names)}]"


def quoted(override: str) -> str:
    """Quote a list that `require_single_value` accepts unquoted; Hydra's own commands would refuse it."""
    key, _, value = override.partition("=")
    is_list = "," in value and not re.search(r"['\"\\()\[\]{}]", value)
    return f"{key}='{value}'" if is_list and TAKES_COMMAS.fullmatch(key.lstrip("+")) else override


def with_first_value(override: Override) -> Override:
    """Return the override with the first of its values, to stand for all runs of a sweep."""
    if not override.is_discrete_sweep():
        return override
    first = next(iter(override.sweep_string_iterator()), "")
    line = f"{override.get_key_element()}={first}"
    return dataclasses.replace(override, value_type=ValueType.ELEMENT, _value=first, input_line=line)


def value_as_typed(override: Override) -> str:
    """Return what follows the equals sign."""
    return str(override.input_line).partition("=")[2].strip()
