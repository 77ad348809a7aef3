"""``optimizer=named``: optimizers by name, each with its own class, parameters, schedule, clipping and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from hpctrain.config import require
from hpctrain.config.optimizer import PAIR, Handling, patterns
from hpctrain.errors import ConfigError
from hpctrain.phrases import listed, page

DEFAULT_LOSS = "loss"


@dataclass(kw_only=True, slots=True)
class Named(Handling):
    """Keys of an entry of optimizer.named; its other keys are arguments of its class."""

    _target_: str = "???"
    """Class to instantiate, such as torch.optim.Adam."""
    match: Any = None
    """Parameters that it trains: a pattern for their names, or a list of patterns; * also matches dots. null: those
    that no other entry matches."""
    exclude: Any = None
    """Parameters that match leaves out: a pattern, or a list of patterns."""
    ndim: Annotated[int | None, require.at_least(0)] = None
    """Only parameters with this number of dimensions; null: any number."""
    loss: str = DEFAULT_LOSS
    """Method of the task that computes the loss that this optimizer minimises. Optimizers with the same loss step
    together."""
    every_steps: Annotated[int, require.at_least(1)] = 1
    """N: step only in every N-th step of the run. Optimizers with the same loss need the same value."""
    schedule: Any = None
    """Keys of a schedule, such as {kind: cosine, warmup_steps: 100}; null: the run's schedule."""
    clip_grad_norm: Annotated[float | None, require.above(0)] = None
    """Largest 2-norm of its gradients together; null: as trainer.clip_grad_norm."""
    clip_grad_value: Annotated[float | None, require.above(0)] = None
    """Largest absolute value of any of its gradients; null: as trainer.clip_grad_value."""


@dataclass(kw_only=True, slots=True)
class NamedOptimizers(require.Checked):
    """Several optimizers, by name; put them into a file of your own, with `defaults: [named, _self_]`."""

    prefix = "optimizer."

    named: dict[str, Any] = field(default_factory=dict)
    """An entry per optimizer, by name: _target_, the arguments of that class, and the keys of an entry."""
    lr: Annotated[float | None, require.above(0)] = None
    """Learning rate of entries that don't set their own; null: the default of their class."""
    weight_decay: Annotated[float | None, require.at_least(0)] = None
    """Weight decay of entries that don't set their own, if their class takes it."""
    betas: Annotated[list[float] | None, PAIR, require.each(require.half_open(0, 1))] = None
    """Decay rates of the two moments for entries that don't set their own, if their class takes them."""


SHARED_KEYS = ("lr", "weight_decay", "betas")
"""Arguments that optimizers share unless they have their own, so that a task's recipe suits any optimizer."""
OF_UPDATES = ("ndim", "loss", "every_steps", "clip_grad_norm", "clip_grad_value")
"""Keys of an entry that a `NamedOptimizer` has as they are."""
NAMED_KEYS = tuple(item.name for item in fields(Named) if item.name != "_target_")
"""Keys of an entry that hpctrain handles itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptimizer:
    """One checked optimizer of the configuration.

    Attributes:
        name: empty for the only one, without `optimizer.named`.
        key: full name of its node, such as ``optimizer.named.critic``.
        node: its keys.
        shared: arguments for a class that takes them, if `node` doesn't have them.
        match: patterns for its parameters; None for all that no other one matches.
        exclude: patterns for parameters that `match` leaves out.
        ndim: number of dimensions of its parameters; None for any.
        loss: method of the task.
        every_steps: steps from one update to the next.
        schedule: keys of its schedule; None for the run's.
        clip_grad_norm: its own bound; None for the run's.
        clip_grad_value: its own bound; None for the run's.
    """

    name: str = ""
    key: str = "optimizer"
    node: Mapping[str, Any]
    shared: Mapping[str, Any] = field(default_factory=dict)
    match: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    ndim: int | None = None
    loss: str = DEFAULT_LOSS
    every_steps: int = 1
    schedule: Mapping[str, Any] | None = None
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None


def named_optimizers(node: Mapping[str, Any]) -> list[NamedOptimizer]:
    """Return the checked optimizers of a configuration, in its order; only one, without a name, for most.

    Args:
        node: the group `optimizer`.

    Raises:
        ConfigError: an entry has a value of the wrong kind, or two of them contradict each other.
    """
    if "named" not in node:
        return [NamedOptimizer(node=node)]
    named = node["named"]
    if not isinstance(named, Mapping) or not named:
        remedy = f"write optimizer.named.NAME._target_=torch.optim.Adam; see {page('how_to/optimizers.md')}"
        raise ConfigError("optimizer.named", named, "must have an entry per optimizer", remedy)
    _refuse_others(node)
    shared = {key: node[key] for key in SHARED_KEYS if node.get(key) is not None}
    found = [_entry(str(name), entry, shared) for name, entry in named.items()]
    _check_together(found)
    return found


def losses_of(optimizers: Sequence[NamedOptimizer]) -> list[str]:
    """Return the methods of the task that compute losses, in the order of their turns."""
    return list(dict.fromkeys(each.loss for each in optimizers))


def _refuse_others(node: Mapping[str, Any]) -> None:
    """Refuse keys that none of the named optimizers would get."""
    if "_target_" in node:
        problem = f"would be ignored next to optimizer._target_={node['_target_']}"
        raise ConfigError(
            "optimizer.named", f"{{{', '.join(map(str, node['named']))}}}", problem, "use optimizer=named"
        )
    for name in node:
        if name != "named" and name not in SHARED_KEYS:
            problem = f"would be ignored: named optimizers share only {listed(SHARED_KEYS)}"
            raise ConfigError(f"optimizer.{name}", node[name], problem, f"set optimizer.named.NAME.{name}")


def _entry(name: str, entry: object, shared: Mapping[str, Any]) -> NamedOptimizer:
    key = f"optimizer.named.{name}"
    if not name.isidentifier():
        raise ConfigError(key, "...", "is not usable as a name", "use letters, digits and _")
    if not isinstance(entry, Mapping):
        raise ConfigError(key, entry, "is not a group of keys", f"write {key}._target_=module.Class")
    # OmegaConf's schemas can't express the several types of the others
    keys = {name for name in NAMED_KEYS if name not in ("groups", "match", "exclude", "schedule")}
    typed = {name: value for name, value in entry.items() if name in keys}
    values, schedule = require.typed(Named, key, typed, _target_=""), entry.get("schedule")
    match = None if entry.get("match") is None else patterns(f"{key}.match", entry["match"])
    exclude = () if entry.get("exclude") is None else patterns(f"{key}.exclude", entry["exclude"])
    if match is None:
        for only in ("exclude", "ndim"):
            if entry.get(only) is not None:
                problem = "narrows match, which isn't set"
                raise ConfigError(f"{key}.{only}", entry[only], problem, f'add {key}.match="*"')
    if not values.loss.isidentifier():
        raise ConfigError(f"{key}.loss", values.loss, "is not the name of a method", "name a method of the task")
    if schedule is not None and not isinstance(schedule, Mapping):
        remedy = f"write {key}.schedule={{kind: {schedule}}}"
        raise ConfigError(f"{key}.schedule", schedule, "is not a group of keys", remedy)
    return NamedOptimizer(
        name=name,
        key=key,
        node=entry,
        shared={key: value for key, value in shared.items() if key not in entry},
        match=match,
        exclude=exclude,
        schedule=schedule,
        **{name: getattr(values, name) for name in OF_UPDATES},
    )


def _check_together(optimizers: Sequence[NamedOptimizer]) -> None:
    rest = [each for each in optimizers if each.match is None]
    if len(rest) > 1:
        problem = f"takes all parameters that no other optimizer matches, as {rest[0].key} does"
        raise ConfigError(f"{rest[1].key}.match", None, problem, "set it for one of them")
    first: dict[str, NamedOptimizer] = {}
    for each in optimizers:
        other = first.setdefault(each.loss, each)
        if other.every_steps != each.every_steps:
            problem = f"differs from {other.key}.every_steps={other.every_steps}, which steps for the same loss"
            raise ConfigError(f"{each.key}.every_steps", each.every_steps, problem, "make them equal")
    if all(each.every_steps > 1 for each in optimizers):
        each = optimizers[0]
        problem = "no optimizer takes part in every step"
        raise ConfigError(f"{each.key}.every_steps", each.every_steps, problem, "set one of them to 1")
