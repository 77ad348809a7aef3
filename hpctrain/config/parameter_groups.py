"""The entries of `optimizer.groups`: which parameters an entry means, and how they are trained."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.phrases import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """One checked entry.

    Attributes:
        key: its full name, such as ``optimizer.groups[0]``.
        match: patterns for the names of parameters; ``*`` also matches dots.
        lr_factor: multiplies the optimizer's learning rate.
        frozen: the parameters aren't trained.
        unfreeze_at_step: completed steps after which they are trained; None: not given in steps.
        unfreeze_at_epoch: the same in passes over the data; None: not given in epochs.
        options: of the optimizer's class, which replace the optimizer's own.
    """

    key: str
    match: tuple[str, ...]
    lr_factor: float = 1.0
    frozen: bool = False
    unfreeze_at_step: int | None = None
    unfreeze_at_epoch: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


OWN_KEYS = tuple(item.name for item in fields(GroupEntry) if item.name not in ("key", "options"))
"""Keys of an entry that hpctrain handles itself."""


def entries_of(key: str, node: Mapping[str, Any]) -> list[GroupEntry]:
    """Return the checked entries of an optimizer's groups; the options of its class aren't checked here.

    Args:
        key: full name of the optimizer's node, such as ``optimizer``.
        node: of the optimizer.

    Raises:
        ConfigError: an entry has no pattern, or a value of the wrong kind.
    """
    groups = node.get("groups") or []
    if not isinstance(groups, list):
        raise ConfigError(f"{key}.groups", groups, "must be a list", f'write {key}.groups=[{{match: "NAME.*"}}]')
    return [_entry(f"{key}.groups[{number}]", entry) for number, entry in enumerate(groups)]


def check_options(entry: GroupEntry, known: Collection[str] | None, own: Mapping[str, Any]) -> None:
    """Check the options of an entry against those of the optimizer's class.

    Args:
        entry: of the groups.
        known: names that the class takes; None if they aren't known.
        own: the optimizer's own values; an entry's value must be of the same kind.

    Raises:
        ConfigError: the class has no such option, or the value is of another kind.
    """
    for name, value in entry.options.items():
        key = f"{entry.key}.{name}"
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, [*known, *OWN_KEYS], n=1)
            remedy = f"did you mean {near[0]}?" if near else f"it takes {listed([*OWN_KEYS, *known])}"
            raise ConfigError(key, value, "is not an option of a group of this optimizer", remedy)
        if name == "lr" and not (_is_number(value) and math.isfinite(value) and value > 0):
            raise ConfigError(key, value, "must be a number above 0", "set it to one")
        if name == "lr" and entry.lr_factor != 1.0:
            raise ConfigError(key, value, f"conflicts with lr_factor={entry.lr_factor:g}", "set one of them")
        if name in own and (kind := _other_kind(value, own[name])):
            raise ConfigError(key, value, f"must be {kind}, like {own[name]}", "correct it")


def _entry(key: str, entry: object) -> GroupEntry:
    if not isinstance(entry, Mapping):
        raise ConfigError(key, entry, "is not a group of keys", 'write {match: "NAME.*", lr_factor: 0.1}')
    values = {str(name): value for name, value in entry.items()}
    if "_target_" in values:
        problem = "groups share the class of their optimizer"
        raise ConfigError(f"{key}._target_", values["_target_"], problem, "use optimizer=named for another class")
    if "match" not in values:
        for name in (name for name in values if name == "params" or difflib.get_close_matches(name, ["match"])):
            raise ConfigError(f"{key}.{name}", values[name], "is not a key of an entry", 'write match: "NAME.*"')
    found = GroupEntry(
        key=key,
        match=patterns(f"{key}.match", values.get("match")),
        options={name: value for name, value in values.items() if name not in OWN_KEYS},
        **{name: values[name] for name in OWN_KEYS if name in values and name != "match"},
    )
    _check_own(found)
    return found


def patterns(key: str, match: object) -> tuple[str, ...]:
    """Return one pattern or a list of patterns as a tuple.

    Raises:
        ConfigError: it is neither.
    """
    found = [match] if isinstance(match, str) else match
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise ConfigError(key, match, "must be a pattern, or a list of patterns", f'write {key}="NAME.*"')
    return tuple(found)


def _check_own(entry: GroupEntry) -> None:
    key, factor = entry.key, entry.lr_factor
    if not (_is_number(factor) and math.isfinite(factor) and factor > 0):
        remedy = "set it to one, or frozen to true for parameters that aren't trained"
        raise ConfigError(f"{key}.lr_factor", factor, "must be a number above 0", remedy)
    if not isinstance(entry.frozen, bool):
        raise ConfigError(f"{key}.frozen", entry.frozen, "must be true or false", "correct it")
    step, epoch = entry.unfreeze_at_step, entry.unfreeze_at_epoch
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 1):
        raise ConfigError(f"{key}.unfreeze_at_step", step, "must be a whole number of at least 1", "correct it")
    if epoch is not None and not (_is_number(epoch) and math.isfinite(epoch) and epoch > 0):
        raise ConfigError(f"{key}.unfreeze_at_epoch", epoch, "must be a number above 0", "correct it")
    if step is not None and epoch is not None:
        problem = f"conflicts with unfreeze_at_step={step}"
        raise ConfigError(f"{key}.unfreeze_at_epoch", epoch, problem, "set one of them")
    if entry.frozen:
        others = [name for name in ("unfreeze_at_step", "unfreeze_at_epoch") if getattr(entry, name) is not None]
        if others:
            problem = f"conflicts with {others[0]}, which trains the parameters later"
            raise ConfigError(f"{key}.frozen", True, problem, "remove one of them")
        if entry.options or factor != 1.0:
            name = next(iter(entry.options), "lr_factor")
            problem = f"conflicts with {name}: frozen parameters aren't trained"
            raise ConfigError(f"{key}.frozen", True, problem, "remove one of them")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _other_kind(value: object, own: object) -> str | None:
    """Return the kind of the optimizer's own value if an entry's isn't of it; None if it is, or isn't known."""
    if isinstance(own, bool):
        return None if isinstance(value, bool) else "true or false"
    if _is_number(own):
        return None if _is_number(value) else "a number"
    if isinstance(own, list):
        alike = isinstance(value, list) and len(value) == len(own) and all(map(_is_number, value))
        return None if alike or not all(map(_is_number, own)) else f"{len(own)} numbers"
    return "a text" if isinstance(own, str) and not isinstance(value, str) else None
