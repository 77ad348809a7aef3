"""The blocks of a model: the modules whose weights a mesh gathers one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from hpctrain.errors import ConfigError
from hpctrain.phrases import listed


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in its order; none lies inside another one.

    A module that shares a parameter with the rest of the model isn't a block: both need it at once.

    Args:
        model: not sharded yet.
        patterns: names as `matches_name` takes them; empty for the modules that the model repeats: the members of each
            outermost list or sequence whose members with parameters are of one class.

    Raises:
        ConfigError: a pattern matches no module with parameters, or one that shares a parameter.
    """
    if not patterns:
        return {name: module for name, module in _repeated(model, "") if not _shares(model, module)}
    modules = {name: module for name, module in model.named_modules() if name and _has_parameters(module)}
    chosen = outermost_matching(modules, patterns, "parallel.blocks", "matches no module with parameters")
    if sharing := [name for name, module in chosen.items() if _shares(model, module)]:
        problem = f"shares parameters with the rest of the model: {listed(sharing)}"
        raise ConfigError("parallel.blocks", list(patterns), problem, "leave it out")
    return chosen


def matches_name(name: str, pattern: str) -> bool:
    """Whether a pattern such as ``blocks.*`` matches a module's name; * and ? match within one part of the name."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatchcase, parts, pattern_parts))


def outermost_matching(
    modules: Mapping[str, nn.Module], patterns: Sequence[str], key: str, problem: str
) -> dict[str, nn.Module]:
    """Return the modules whose names match patterns, without those inside another one that matches.

    Args:
        modules: by name, in the model's order.
        patterns: names as `matches_name` takes them.
        key: of the configuration that has the patterns.
        problem: what a pattern does that matches none.

    Raises:
        ConfigError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(matches_name(name, pattern) for name in modules):
            raise ConfigError(key, pattern, problem, f"the model has {listed(modules)}")
    matching: dict[str, nn.Module] = {}
    for name, module in modules.items():
        inside = any(name.startswith(f"{outer}.") for outer in matching)
        if not inside and any(matches_name(name, pattern) for pattern in patterns):
            matching[name] = module
    return matching


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _members(child, f"{prefix}{name}.") or _repeated(child, f"{prefix}{name}.")
    if not prefix and isinstance(module, nn.Sequential):
        yield from _members(module, "")


def _members(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """Return the members of a list or sequence, if those with parameters are of one class."""
    holds = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    members = [(f"{prefix}{name}", child) for name, child in module.named_children() if _has_parameters(child)]
    return members if holds and len(members) > 1 and len({type(member) for _, member in members}) == 1 else []


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shares(model: nn.Module, block: nn.Module) -> bool:
    block_modules = {id(module) for module in block.modules()}
    block_parameters = {id(parameter) for parameter in block.parameters()}
    return any(
        id(parameter) in block_parameters
        for module in model.modules()
        if id(module) not in block_modules
        for parameter in module.parameters(recurse=False)
    )
