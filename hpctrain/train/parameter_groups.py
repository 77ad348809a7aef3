"""Groups of parameters that an optimizer trains alike: by its entries, by layer, and by weight decay."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hpctrain.checkpoint.state import PlainNames
from hpctrain.config.optimizer import GroupEntry, NamedOptimizer, ParameterOptions, entries_of, named_optimizers
from hpctrain.errors import ConfigError
from hpctrain.phrases import listed


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same options; a group of the optimizer unless they are frozen.

    Attributes:
        label: how the start table names it.
        parameters: by plain name, in the model's order.
        entry: of the configuration; None for the parameters that no entry matches.
        lr_factor: multiplies the optimizer's learning rate.
        options: of the class, which replace the optimizer's own.
    """

    label: str
    parameters: Mapping[str, nn.Parameter]
    entry: GroupEntry | None = None
    lr_factor: float = 1.0
    options: Mapping[str, Any]

    @property
    def frozen(self) -> bool:
        """Whether the parameters are never trained."""
        return self.entry is not None and self.entry.frozen


class ModelNames:
    """The parameters of a model by plain name, and all names of one that is used in several places.

    Args:
        model: its tree of modules is read once.
    """

    def __init__(self, model: nn.Module) -> None:
        plain = PlainNames(model)
        self.parameters = {plain(name): parameter for name, parameter in model.named_parameters()}
        self._all: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._all.setdefault(id(parameter), []).append(plain(name))

    def matches(self, name: str, patterns: Iterable[str]) -> bool:
        """Whether one of the patterns matches one of the names of the parameter ``name``."""
        names = self._all[id(self.parameters[name])]
        return any(fnmatchcase(alias, pattern) for pattern in patterns for alias in names)

    def require_match(self, key: str, pattern: str) -> None:
        """Refuse a pattern that matches no parameter, and name near ones.

        Raises:
            ConfigError: it matches none.
        """
        if any(self.matches(name, [pattern]) for name in self.parameters):
            return
        parts = [name.split(".") for name in self.parameters]
        outer = {".".join(path[:length]) + ".*" for path in parts for length in range(1, len(path))}
        near = difflib.get_close_matches(pattern, sorted(outer.union(self.parameters)), n=3)
        first = dict.fromkeys(f"{path[0]}.*" if len(path) > 1 else path[0] for path in parts)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"it has {listed(first)}"
        raise ConfigError(key, pattern, "matches no parameter of the model", remedy)


def assign(names: ModelNames, optimizer_names: Sequence[str], entries: Sequence[GroupEntry]) -> list[ParameterGroup]:
    """Assign an optimizer's parameters to the entries of its groups; the first entry that matches one decides.

    Args:
        names: of the whole model.
        optimizer_names: names of the optimizer's parameters.
        entries: of the optimizer.

    Returns:
        The parameters that no entry matches, if there are any, then a group per entry.

    Raises:
        ConfigError: a pattern matches nothing, or an entry gets nothing that can be trained.
    """
    free_names = list(optimizer_names)
    groups = []
    for entry in entries:
        for pattern in entry.match:
            names.require_match(f"{entry.key}.match", pattern)
        matched = {name for name in optimizer_names if names.matches(name, entry.match)}
        entry_names = [name for name in free_names if name in matched]
        free_names = [name for name in free_names if name not in matched]
        inside = {name: names.parameters[name] for name in entry_names}
        if not entry.frozen:
            inside = {name: parameter for name, parameter in inside.items() if parameter.requires_grad}
        if not inside:
            raise _empty_group_error(entry, matched, entry_names)
        label = ", ".join(entry.match)
        groups.append(
            ParameterGroup(
                label=label, parameters=inside, entry=entry, lr_factor=entry.lr_factor, options=entry.options
            )
        )
    free_parameters = {name: names.parameters[name] for name in free_names if names.parameters[name].requires_grad}
    first = ParameterGroup(label="(others)" if entries else "(all)", parameters=free_parameters, options={})
    return [first, *groups] if free_parameters else groups


def _empty_group_error(entry: GroupEntry, matched: Collection[str], entry_names: Sequence[str]) -> ConfigError:
    pattern = listed(entry.match)
    if entry_names:
        problem = "the model itself has frozen all parameters that it matches"
        return ConfigError(f"{entry.key}.match", pattern, problem, "remove the entry, or unfreeze them in the model")
    if matched:
        problem = "earlier entries already have all parameters that it matches"
        return ConfigError(f"{entry.key}.match", pattern, problem, "list the narrower pattern first")
    problem = "matches only parameters of other optimizers"
    return ConfigError(f"{entry.key}.match", pattern, problem, "list it among the groups of that optimizer")


def split(
    groups: Iterable[ParameterGroup], handling: ParameterOptions, names: ModelNames, key: str
) -> list[ParameterGroup]:
    """Split groups by layer if the learning rate decays over the layers, and by weight decay if some are spared it.

    Raises:
        ConfigError: the model has no such list of blocks.
    """
    parts = list(groups)
    if handling.layer_decay is not None:
        factors = layer_factors(list(names.parameters), handling.layer_decay, handling.layer_decay_module, key)
        parts = [part for group in parts for part in _by_layer(group, factors)]
    if handling.no_decay_norm_bias:
        parts = [part for group in parts for part in _by_weight_decay(group)]
    return parts


def layer_factors(names: Sequence[str], decay: float, layer_decay_module: str, key: str) -> dict[str, float]:
    """Return the learning rate's factor of each parameter under layer-wise decay.

    Of L blocks, block i (from 0) has the factor decay^(L - i). Parameters before the first block, in the model's order,
    have decay^(L + 1), like those of the embeddings; all others, such as the head's, have 1. This is the formula of
    Clark et al. (ELECTRA, 2020) as Bao et al. (BEiT, 2022) and He et al. (MAE, 2022) apply it.

    Args:
        names: of all parameters, in the model's order.
        decay: per block.
        layer_decay_module: a pattern for the name of the module whose children are the blocks.
        key: full name of the optimizer's node.

    Raises:
        ConfigError: the model has no such blocks.
    """
    blocks: dict[str, int] = {}
    for name in names:
        # the outermost number: a block may have a list of its own
        for part in re.finditer(r"\.(\d+)\.", name):
            if fnmatchcase(name[: part.start()], layer_decay_module):
                blocks[name] = int(part[1])
                break
    if not blocks:
        numbered = sorted({name[: match.start()] for name in names if (match := re.search(r"\.(\d+)\.", name))})
        remedy = f"numbered modules are in {listed(numbered)}" if numbered else "remove layer_decay"
        raise ConfigError(
            f"{key}.layer_decay_module", layer_decay_module, "the model has no numbered blocks of that name", remedy
        )
    count = max(blocks.values()) + 1
    first = next(number for number, name in enumerate(names) if name in blocks)
    return {
        name: decay ** (count - blocks[name]) if name in blocks else decay ** (count + 1) if number < first else 1.0
        for number, name in enumerate(names)
    }


def _by_layer(group: ParameterGroup, factors: Mapping[str, float]) -> list[ParameterGroup]:
    if group.frozen:
        return [group]
    parts = []
    for factor in sorted({factors[name] for name in group.parameters}):
        inside = {name: parameter for name, parameter in group.parameters.items() if factors[name] == factor}
        label = f"{group.label} x {factor:.3g}"
        parts.append(replace(group, label=label, parameters=inside, lr_factor=group.lr_factor * factor))
    return parts


def _by_weight_decay(group: ParameterGroup) -> list[ParameterGroup]:
    if group.frozen:
        return [group]
    spared = {
        name: parameter
        for name, parameter in group.parameters.items()
        if parameter.ndim < 2 or name.rpartition(".")[2] == "bias"
    }
    decayed = {name: parameter for name, parameter in group.parameters.items() if name not in spared}
    parts = [
        replace(group, parameters=decayed),
        replace(
            group,
            label=f"{group.label}, norms and biases",
            parameters=spared,
            options={**group.options, "weight_decay": 0.0},
        ),
    ]
    return [part for part in parts if part.parameters]


def distribute(optimizers: Sequence[NamedOptimizer], names: ModelNames) -> list[list[str]]:
    """Distribute the parameters among the optimizers.

    Returns:
        The names of each one's parameters, in the model's order; frozen ones included.

    Raises:
        ConfigError: a parameter that requires a gradient belongs to none, or to two of them, or one has none.
    """
    if not optimizers[0].name:
        return [list(names.parameters)]
    names_by_optimizer = [_names_matching(optimizer, names) for optimizer in optimizers]
    matched_names = {name for own_names in names_by_optimizer for name in own_names}
    for number, optimizer in enumerate(optimizers):
        if optimizer.match is None:
            names_by_optimizer[number] = [name for name in names.parameters if name not in matched_names]
    owners: dict[str, NamedOptimizer] = {}
    trained = [name for name, parameter in names.parameters.items() if parameter.requires_grad]
    for optimizer, own_names in zip(optimizers, names_by_optimizer, strict=True):
        if not set(own_names).intersection(trained):
            raise _no_match_error(optimizer)
        for name in own_names:
            owner = owners.setdefault(name, optimizer)
            if owner is not optimizer and names.parameters[name].requires_grad:
                problem = f"{name} also belongs to {owner.key}"
                remedy = f"narrow one of the patterns, or add {optimizer.key}.exclude"
                raise ConfigError(f"{optimizer.key}.match", listed(optimizer.match or ()), problem, remedy)
    if unowned := [name for name in trained if name not in owners]:
        problem = f"no optimizer trains {listed(unowned, max_names=3)}"
        remedy = "match them, leave match out in one entry, or freeze them in build_model"
        raise ConfigError("optimizer.named", listed(optimizer.name for optimizer in optimizers), problem, remedy)
    return names_by_optimizer


def _no_match_error(optimizer: NamedOptimizer) -> ConfigError:
    if optimizer.match is None:
        problem = "the other optimizers match all parameters that require a gradient"
        return ConfigError(f"{optimizer.key}.match", None, problem, "narrow their patterns, or remove the entry")
    narrowed = f", with ndim={optimizer.ndim}" if optimizer.ndim is not None else ""
    narrowed += f" and without {listed(optimizer.exclude)}" if optimizer.exclude else ""
    problem = f"matches no parameter that requires a gradient{narrowed}"
    return ConfigError(f"{optimizer.key}.match", listed(optimizer.match), problem, "correct or remove the entry")


def _names_matching(optimizer: NamedOptimizer, names: ModelNames) -> list[str]:
    if optimizer.match is None:
        return []
    for pattern in optimizer.match:
        names.require_match(f"{optimizer.key}.match", pattern)
    return [
        name
        for name, parameter in names.parameters.items()
        if names.matches(name, optimizer.match)
        and not names.matches(name, optimizer.exclude)
        and optimizer.ndim in (None, parameter.ndim)
    ]


def freeze(node: Mapping[str, Any], model: nn.Module) -> None:
    """Freeze the parameters that groups exclude from training.

    Args:
        node: the group `optimizer`.
        model: before anything depends on which of its parameters are trained.

    Raises:
        ConfigError: as `distribute` and `assign`.
    """
    optimizers = named_optimizers(node)
    entries = [entries_of(optimizer.key, optimizer.node) for optimizer in optimizers]
    if not any(entry.frozen for optimizer_entries in entries for entry in optimizer_entries):
        return
    names = ModelNames(model)
    for optimizer_names, optimizer_entries in zip(distribute(optimizers, names), entries, strict=True):
        groups = assign(names, optimizer_names, optimizer_entries)
        if all(group.frozen for group in groups):
            problem = "freezes all parameters of this optimizer"
            if len(optimizer_entries) > 1:
                problem = "freezes the last parameters of this optimizer that aren't frozen"
            remedy = "leave some of them unfrozen, or remove the optimizer"
            raise ConfigError(f"{optimizer_entries[-1].key}.frozen", True, problem, remedy)
        for group in groups:
            if group.frozen:
                for parameter in group.parameters.values():
                    parameter.requires_grad_(False)
