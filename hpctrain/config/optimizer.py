"""``conf/optimizer``: any class of torch.optim, by ``_target_``, or several optimizers by name. Owner: hpctrain.train.

Each named optimizer has its own class, parameters, schedule, clipping and loss.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeGuard

from omegaconf import MISSING

from hpctrain.config import require
from hpctrain.errors import ConfigError
from hpctrain.phrases import listed, page

DEFAULT_LOSS = "loss"
BETWEEN_0_AND_1 = require.that(lambda value: 0 < value <= 1, "must be above 0, and at most 1", "set {key}=0.75")


@dataclass(kw_only=True, slots=True)
class ParameterOptions(require.Checked):
    """hpctrain's own options for the learning rate and the parameters; not passed to the class."""

    lr_scaling: Annotated[str, require.one_of("none", "linear", "sqrt")] = "none"
    """`none`; `linear`: lr x global_batch_size / lr_base_batch_size (Goyal et al., 2017); `sqrt`: its square root."""
    lr_base_batch_size: Annotated[int, require.at_least(1)] = 256
    """Global batch size for which lr was chosen."""
    no_decay_norm_bias: bool = False
    """No weight decay for biases and for parameters of fewer than two dimensions, such as those of norms."""
    groups: list[Any] = field(default_factory=list)
    """Parameter groups: a list of entries such as {match: "NAME.*", lr_factor: 0.1, weight_decay: 0.0}. match is a
    pattern or a list of patterns; the first entry that matches a parameter applies. With frozen: true the parameters
    aren't trained; with unfreeze_at_step or unfreeze_at_epoch they are trained after that number of steps or epochs."""
    layer_decay: Annotated[float | None, BETWEEN_0_AND_1] = None
    """Learning rate of a block relative to that of the next one, such as 0.75; null: the same for all."""
    layer_decay_module: Annotated[str, require.not_empty] = "blocks"
    """For layer_decay: name of the module whose children are the numbered blocks, such as blocks or encoder.layer; may
    have * and ?."""


OPTION_KEYS = tuple(item.name for item in fields(ParameterOptions))


def parameter_options(node: Mapping[str, Any]) -> ParameterOptions:
    """Return the keys of an optimizer's node that hpctrain handles itself."""
    return ParameterOptions(**{key: node[key] for key in OPTION_KEYS if key in node})


@dataclass(kw_only=True, slots=True)
class Fusible(ParameterOptions):
    """An optimizer that can update several parameters at once."""

    foreach: bool | None = None
    """Update many parameters per operation; null: on GPUs."""
    fused: bool | None = None
    """Update in one kernel; null: no."""

    def __post_init__(self) -> None:
        """Also refuse both ways of updating at once."""
        ParameterOptions.__post_init__(self)
        if self.fused and self.foreach:
            raise ConfigError("optimizer.fused", True, "conflicts with optimizer.foreach=True", "set one of them")


PAIR = require.that(lambda betas: len(betas) == 2, "must be two numbers", "write {key}=[0.9,0.999]")


@dataclass(kw_only=True, slots=True)
class AdamW(Fusible):
    """torch.optim.AdamW (Loshchilov & Hutter, 2019)."""

    _target_: str = "torch.optim.AdamW"
    """Class to instantiate."""
    lr: Annotated[float, require.above(0)] = 3e-3
    """Learning rate at the schedule's factor 1."""
    betas: Annotated[list[float], PAIR, require.each(require.half_open(0, 1))] = field(
        default_factory=lambda: [0.9, 0.999]
    )
    """Decay rates of the two moments."""
    eps: Annotated[float, require.at_least(0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, require.at_least(0)] = 0.01
    """Decoupled weight decay, per unit of learning rate."""


@dataclass(kw_only=True, slots=True)
class SGD(Fusible):
    """torch.optim.SGD with momentum."""

    _target_: str = "torch.optim.SGD"
    """Class to instantiate."""
    lr: Annotated[float, require.above(0)] = 0.1
    """Learning rate at the schedule's factor 1."""
    momentum: Annotated[float, require.between(0, 1)] = 0.9
    """Momentum factor."""
    weight_decay: Annotated[float, require.at_least(0)] = 5e-4
    """L2 penalty."""
    nesterov: bool = False
    """Nesterov's momentum."""

    def __post_init__(self) -> None:
        """Also refuse Nesterov's momentum without momentum."""
        Fusible.__post_init__(self)
        if self.nesterov and not self.momentum:
            raise ConfigError("optimizer.nesterov", True, "needs a momentum", "set optimizer.momentum above 0")


@dataclass(kw_only=True, slots=True)
class Custom(ParameterOptions):
    """Any other optimizer class; add its other arguments as +optimizer.NAME=VALUE."""

    _target_: str = MISSING
    """Class to instantiate, such as torch.optim.RMSprop."""
    lr: Annotated[float, require.above(0)] = 1e-3
    """Learning rate at the schedule's factor 1."""


@dataclass(kw_only=True, slots=True)
class NamedOptimizerKeys(ParameterOptions):
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

    named: dict[str, Any] = field(default_factory=dict)
    """An entry per optimizer, by name: _target_, the arguments of that class, and the keys of an entry."""
    lr: Annotated[float | None, require.above(0)] = None
    """Learning rate of entries that don't set their own; null: the default of their class."""
    weight_decay: Annotated[float | None, require.at_least(0)] = None
    """Weight decay of entries that don't set their own, if their class takes it."""
    betas: Annotated[list[float] | None, PAIR, require.each(require.half_open(0, 1))] = None
    """Decay rates of the two moments for entries that don't set their own, if their class takes them."""


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

    def __post_init__(self) -> None:
        """Check hpctrain's own keys."""
        remedy = "set it to one, or frozen to true for parameters that aren't trained"
        require_positive(f"{self.key}.lr_factor", self.lr_factor, remedy)
        if not isinstance(self.frozen, bool):
            raise ConfigError(f"{self.key}.frozen", self.frozen, "must be true or false", "correct it")
        step, epoch = self.unfreeze_at_step, self.unfreeze_at_epoch
        key = f"{self.key}.unfreeze_at_epoch"
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 1):
            problem = "must be a whole number of at least 1"
            raise ConfigError(f"{self.key}.unfreeze_at_step", step, problem, "correct it")
        if epoch is not None:
            require_positive(key, epoch, "correct it")
            if step is not None:
                raise ConfigError(key, epoch, f"conflicts with unfreeze_at_step={step}", "set one of them")
        if self.frozen and (self.unfreezing or self.options or self.lr_factor != 1.0):
            name = next(iter(self.options), "lr_factor")
            problem = f"conflicts with {name}: frozen parameters aren't trained"
            if self.unfreezing:
                problem = f"conflicts with {self.unfreezing[0]}, which trains the parameters later"
            raise ConfigError(f"{self.key}.frozen", True, problem, "remove one of them")

    @property
    def unfreezing(self) -> tuple[str, float] | None:
        """The key after whose value the parameters are trained, and that value; None if it isn't set."""
        values = {name: getattr(self, name) for name in ("unfreeze_at_step", "unfreeze_at_epoch")}
        return next(((name, value) for name, value in values.items() if value is not None), None)


ENTRY_KEYS = tuple(item.name for item in fields(GroupEntry) if item.name not in ("key", "options"))
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


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


IS_NUMBER = require.that(_is_number, "must be a number", "correct it")
IS_LIST = require.that(lambda value: isinstance(value, list), "must be a list of numbers", "write {key}=[0.9,0.999]")
COMMON_OPTION_CHECKS: Mapping[str, tuple[require.Check, ...]] = {
    "weight_decay": (IS_NUMBER, require.at_least(0)),
    "momentum": (IS_NUMBER, require.at_least(0)),
    "betas": (IS_LIST, require.each(IS_NUMBER), require.each(require.half_open(0, 1))),
}
"""Checks of options that mean the same in every class that has them."""


def check_options(entry: GroupEntry, option_names: Collection[str] | None, optimizer_values: Mapping[str, Any]) -> None:
    """Check the options of an entry against those of the optimizer's class.

    Args:
        entry: of the groups.
        option_names: names that the class takes; None if they aren't known.
        optimizer_values: the optimizer's own values; an entry's value must be of the same kind.

    Raises:
        ConfigError: the class has no such option, or the value is of another kind.
    """
    for name, value in entry.options.items():
        key = f"{entry.key}.{name}"
        if option_names is not None and name not in option_names:
            near = difflib.get_close_matches(name, [*option_names, *ENTRY_KEYS], n=1)
            remedy = f"did you mean {near[0]}?" if near else f"it takes {listed([*ENTRY_KEYS, *option_names])}"
            raise ConfigError(key, value, "is not an option of a group of this optimizer", remedy)
        if name == "lr":
            require_positive(key, value, "set it to one")
        if name == "lr" and entry.lr_factor != 1.0:
            raise ConfigError(key, value, f"conflicts with lr_factor={entry.lr_factor:g}", "set one of them")
        if name in optimizer_values and (kind := _expected_kind(value, optimizer_values[name])):
            raise ConfigError(key, value, f"must be {kind}, like {optimizer_values[name]}", "correct it")


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
    return GroupEntry(
        key=key,
        match=patterns(f"{key}.match", values.get("match")),
        options={name: value for name, value in values.items() if name not in ENTRY_KEYS},
        **{name: values[name] for name in ENTRY_KEYS if name in values and name != "match"},
    )


def patterns(key: str, match: object) -> tuple[str, ...]:
    """Return one pattern or a list of patterns as a tuple.

    Raises:
        ConfigError: it is neither.
    """
    texts = [match] if isinstance(match, str) else match
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(key, match, "must be a pattern, or a list of patterns", f'write {key}="NAME.*"')
    return tuple(texts)


def require_positive(key: str, value: object, remedy: str) -> None:
    """Refuse a value that isn't a finite number above 0.

    Raises:
        ConfigError: it isn't.
    """
    if not (_is_number(value) and 0 < value < math.inf):
        raise ConfigError(key, value, "must be a number above 0", remedy)


def _expected_kind(value: object, optimizer_value: object) -> str | None:
    """Return the kind of the optimizer's own value if an entry's isn't of it; None if it is, or isn't known."""
    if isinstance(optimizer_value, bool):
        return None if isinstance(value, bool) else "true or false"
    if _is_number(optimizer_value):
        return None if _is_number(value) else "a number"
    if isinstance(optimizer_value, list):
        alike = isinstance(value, list) and len(value) == len(optimizer_value) and all(map(_is_number, value))
        return None if alike or not all(map(_is_number, optimizer_value)) else f"{len(optimizer_value)} numbers"
    return "a text" if isinstance(optimizer_value, str) and not isinstance(value, str) else None


SHARED_KEYS = ("lr", "weight_decay", "betas")
"""Arguments that optimizers share unless they have their own, so that a task's recipe suits any optimizer."""
UPDATE_KEYS = ("ndim", "loss", "every_steps", "clip_grad_norm", "clip_grad_value")
"""Keys of an entry that a `NamedOptimizer` has as they are."""
NAMED_KEYS = tuple(item.name for item in fields(NamedOptimizerKeys) if item.name != "_target_")
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
    entries = node["named"]
    if not isinstance(entries, Mapping) or not entries:
        remedy = f"write optimizer.named.NAME._target_=torch.optim.Adam; see {page('how_to/optimizers.md')}"
        raise ConfigError("optimizer.named", entries, "must have an entry per optimizer", remedy)
    _refuse_others(node)
    shared = {key: node[key] for key in SHARED_KEYS if node.get(key) is not None}
    optimizers = [_named_optimizer(str(name), entry, shared) for name, entry in entries.items()]
    _check_combination(optimizers)
    return optimizers


def refuse_unfreezing(optimizers: Sequence[NamedOptimizer], problem: str, remedy: str) -> None:
    """Refuse entries of the groups whose parameters are trained later.

    Raises:
        ConfigError: there is one.
    """
    for optimizer in optimizers:
        for entry in entries_of(optimizer.key, optimizer.node):
            if entry.unfreezing is not None:
                raise ConfigError(f"{entry.key}.{entry.unfreezing[0]}", entry.unfreezing[1], problem, remedy)


def losses_of(optimizers: Sequence[NamedOptimizer]) -> list[str]:
    """Return the methods of the task that compute losses, in the order of their turns."""
    return list(dict.fromkeys(optimizer.loss for optimizer in optimizers))


def _refuse_others(node: Mapping[str, Any]) -> None:
    """Refuse keys that none of the named optimizers would get."""
    if "_target_" in node:
        problem = f"would be ignored next to optimizer._target_={node['_target_']}"
        names = ", ".join(map(str, node["named"]))
        raise ConfigError("optimizer.named", f"{{{names}}}", problem, "use optimizer=named")
    for name in node:
        if name != "named" and name not in SHARED_KEYS:
            problem = f"would be ignored: named optimizers share only {listed(SHARED_KEYS)}"
            raise ConfigError(f"optimizer.{name}", node[name], problem, f"set optimizer.named.NAME.{name}")


def _named_optimizer(name: str, entry: object, shared: Mapping[str, Any]) -> NamedOptimizer:
    key = f"optimizer.named.{name}"
    if not name.isidentifier():
        raise ConfigError(key, "...", "is not usable as a name", "use letters, digits and _")
    if not isinstance(entry, Mapping):
        raise ConfigError(key, entry, "is not a group of keys", f"write {key}._target_=module.Class")
    # OmegaConf's schemas can't express the several types of the others
    keys = {name for name in NAMED_KEYS if name not in ("groups", "match", "exclude", "schedule")}
    single_values = {name: value for name, value in entry.items() if name in keys}
    values, schedule = require.to_schema(NamedOptimizerKeys, key, single_values, _target_=""), entry.get("schedule")
    match = None if entry.get("match") is None else patterns(f"{key}.match", entry["match"])
    exclude = () if entry.get("exclude") is None else patterns(f"{key}.exclude", entry["exclude"])
    if match is None:
        for narrowing in ("exclude", "ndim"):
            if entry.get(narrowing) is not None:
                problem = "narrows match, which isn't set"
                raise ConfigError(f"{key}.{narrowing}", entry[narrowing], problem, f'add {key}.match="*"')
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
        **{name: getattr(values, name) for name in UPDATE_KEYS},
    )


def _check_combination(optimizers: Sequence[NamedOptimizer]) -> None:
    catch_all = [optimizer for optimizer in optimizers if optimizer.match is None]
    if len(catch_all) > 1:
        problem = f"takes all parameters that no other optimizer matches, as {catch_all[0].key} does"
        raise ConfigError(f"{catch_all[1].key}.match", None, problem, "set it for one of them")
    first: dict[str, NamedOptimizer] = {}
    for optimizer in optimizers:
        earlier = first.setdefault(optimizer.loss, optimizer)
        if earlier.every_steps != optimizer.every_steps:
            problem = f"differs from {earlier.key}.every_steps={earlier.every_steps}, which steps for the same loss"
            raise ConfigError(f"{optimizer.key}.every_steps", optimizer.every_steps, problem, "make them equal")
    if all(optimizer.every_steps > 1 for optimizer in optimizers):
        optimizer = optimizers[0]
        problem = "no optimizer takes part in every step"
        raise ConfigError(f"{optimizer.key}.every_steps", optimizer.every_steps, problem, "set one of them to 1")
