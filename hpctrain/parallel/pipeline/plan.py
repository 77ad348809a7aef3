"""Division of a model's modules into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from torch import Tensor, nn

from hpctrain.config.mesh import PIPELINE
from hpctrain.errors import ConfigError, TaskError
from hpctrain.parallel.blocks import matches_name
from hpctrain.phrases import listed

KEY, METHOD = PIPELINE.key, PIPELINE.method

Plan: TypeAlias = Sequence[str | Sequence[str]]
"""Names of modules in the order in which a forward pass calls them; those in a tuple stay in one stage."""
Entry: TypeAlias = tuple[str, ...]
"""Names of the modules, or parameters, that stay in one stage."""


def find_plan(model: nn.Module, task: object, degree: int) -> Plan:
    """Return the plan of the task, or else that of the model; of an `nn.Sequential`, its members.

    Args:
        model: of the training.
        task: of the training.
        degree: number of groups of ranks among which the model is divided.

    Raises:
        ConfigError: neither has one.
        TaskError: it isn't a plan.
    """
    for owner in (task, model):
        make: Callable[[], Any] | None = getattr(owner, METHOD, None)
        plan = None if make is None else make()
        if plan is None:
            continue
        if isinstance(plan, str) or not all(map(_is_entry, plan)):
            name = f"{type(owner).__name__}.{METHOD}"
            raise TaskError(f"{name} must return a list of names of modules, and tuples of names")
        return list(plan)
    if isinstance(model, nn.Sequential):
        return [name for name, _ in model.named_children()]
    raise PIPELINE.missing(degree, model=type(model).__name__, task=type(task).__name__)


def stages_of(model: nn.Module, plan: Plan, num_stages: int, begins: Sequence[str] = ()) -> list[list[str]]:
    """Cut a model into stages.

    Without `begins`, the stage with the most parameters has as few as possible. Embeddings don't count where they are
    only looked up: in the first entry that names them.

    Args:
        model: on any device.
        plan: of the model.
        num_stages: how many stages.
        begins: names with which the second and all further stages begin; empty to balance them.

    Returns:
        For each stage, the names of its modules and parameters. A name may be in several, whose weights are shared.
        Parameters and buffers of the model itself that no entry names are in all stages.

    Raises:
        TaskError: a name matches nothing, or the plan leaves out modules.
        ConfigError: there are fewer entries than stages, or no entry begins with a name of `begins`.
    """
    entries = _expanded(model, plan)
    _require_all(model, entries)
    if len(entries) < num_stages:
        problem = f"needs {num_stages} stages, and the plan of {type(model).__name__} has {len(entries)} entries"
        raise ConfigError(KEY, num_stages, problem, f"use at most {len(entries)} stages, or a model with more layers")
    starts = _starts_of(entries, begins) if begins else _balanced(_costs(model, entries), num_stages)
    return [
        list(dict.fromkeys(name for entry in entries[begin:end] for name in entry))
        for begin, end in pairwise([*starts, len(entries)])
    ]


def _is_entry(entry: object) -> bool:
    if isinstance(entry, str):
        return True
    return isinstance(entry, list | tuple) and bool(entry) and all(isinstance(name, str) for name in entry)


def _expanded(model: nn.Module, plan: Plan) -> list[Entry]:
    """Return the entries with names in the place of patterns; a pattern is an entry for each name, if it is alone."""
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in _named_tensors(model)]
    entries: list[Entry] = []
    for entry in plan:
        patterns = [entry] if isinstance(entry, str) else entry
        matches = [_matching(names, pattern) for pattern in patterns]
        if isinstance(entry, str):
            entries += [(name,) for name in matches[0]]
        else:
            entries.append(tuple(name for matching_names in matches for name in matching_names))
    return entries


def _matching(names: Sequence[str], pattern: str) -> list[str]:
    matches = [name for name in names if matches_name(name, pattern)]
    if not matches:
        raise TaskError(f"{METHOD} names {pattern}, which matches nothing in the model; it has {listed(names)}")
    return matches


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return all parameters and buffers of a model by name."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _require_all(model: nn.Module, entries: Iterable[Entry]) -> None:
    plan_names = {name for entry in entries for name in entry}
    # what belongs to no module is in all stages
    tensor_names = [name for name, _ in _named_tensors(model) if "." in name]
    if missing := [name for name in tensor_names if not any(is_inside(name, outer) for outer in plan_names)]:
        raise TaskError(f"{METHOD} leaves out {listed(missing)}: name the modules in which they are")
    # without a stage of its own, a module such as an activation function would be called in each of them
    members = nn.ModuleList | nn.ModuleDict | nn.Sequential | nn.Identity
    leaves = [
        name
        for name, module in model.named_modules()
        if name and not isinstance(module, members) and next(module.children(), None) is None
    ]
    if missing := [name for name in leaves if not any(is_inside(name, outer) for outer in plan_names)]:
        raise TaskError(f"{METHOD} leaves out {listed(missing)}: name all modules that a forward pass calls")


def is_inside(name: str, outer: str) -> bool:
    """Whether a parameter, buffer or module belongs to the module of the name `outer`, or is it."""
    return name == outer or name.startswith(f"{outer}.")


def _costs(model: nn.Module, entries: Sequence[Entry]) -> list[int]:
    looked_up = {
        f"{path}.weight"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    costs = []
    for entry in entries:
        cost = 0
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if any(is_inside(name, outer) for outer in entry):
                cost += 0 if name in looked_up else parameter.numel()
                looked_up.discard(name)
        costs.append(cost)
    return costs


def _balanced(costs: Sequence[int], num_stages: int) -> list[int]:
    """Return the index with which each stage begins, so that the largest sum of a stage is as small as possible.

    Of several ways to do that, take one with a small sum of squares, which is even, and in which stages begin late:
    with an entry that has parameters, where it follows others without any.
    """
    sums = [0, *accumulate(costs)]
    # of the first so many entries in so many stages: the largest sum, the squares, and where the last stage begins
    best = [(total, total**2, 0) for total in sums]
    begins = [[0] * len(sums)]
    for stage in range(1, num_stages):
        best = [
            min(
                (
                    (
                        max(best[begin][0], sums[end] - sums[begin]),
                        best[begin][1] + (sums[end] - sums[begin]) ** 2,
                        -begin,
                    )
                    for begin in range(stage, end)
                ),
                default=(0, 0, 0),
            )
            for end in range(len(sums))
        ]
        begins.append([-begin for _, _, begin in best])
    starts, end = [], len(costs)
    for stage_begins in reversed(begins):
        end = stage_begins[end]
        starts.append(end)
    return starts[::-1]


def _starts_of(entries: Sequence[Entry], begins: Sequence[str]) -> list[int]:
    starts = [0]
    for name in begins:
        following = [index for index, entry in enumerate(entries) if index > starts[-1] and entry[0] == name]
        if not following:
            first = [entry[0] for entry in entries[starts[-1] + 1 :]]
            problem = f"isn't the first module of an entry of the plan after {entries[starts[-1]][0]}"
            raise ConfigError("parallel.stages", name, problem, f"use one of {listed(first, max_names=8)}")
        starts.append(following[0])
    return starts
