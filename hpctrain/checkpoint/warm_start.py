"""A new run that begins with given weights; not a resume, which goes on with everything."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from hpctrain.checkpoint.names import PlainNames
from hpctrain.checkpoint.reader import load
from hpctrain.errors import CheckpointError
from hpctrain.phrases import listed
from hpctrain.run.checkpoints import newest_intact
from hpctrain.run.directory import RunDirectory

SHOWN = 10

log = logging.getLogger("hpctrain.checkpoint")


@dataclass(frozen=True, slots=True)
class Matched:
    """What a warm start took.

    Attributes:
        taken: names whose weights were copied.
        only_here: names of the model that match the pattern and were not found.
        only_there: names of the file that match the pattern and are not in the model.
        other_shape: names whose shapes differ.
    """

    taken: tuple[str, ...]
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    other_shape: tuple[str, ...]


def warm_start(model: nn.Module, source: Path, *, match: str = "*", strict: bool = True) -> Matched:
    """Copy weights and buffers by name; not collective: rank zero does it, and DDP sends them to the others.

    What a module keeps beside them (its extra state) stays as it is, where that is no tensor.

    Args:
        model: outside of DDP, or its names are taken as if it were.
        source: a run directory, a checkpoint's directory, or a file of named tensors.
        match: a pattern with * and ? for the names that are wanted.
        strict: every name that matches must be in both, in the same shape.

    Raises:
        CheckpointError: nothing matches, the source can't be read, or strictness is hurt; the names are listed.
    """
    plain = PlainNames(model)
    saved = _wanted(read_weights(source), match)
    here = _wanted({plain(name): value for name, value in model.state_dict().items()}, match)
    shared = sorted(saved.keys() & here.keys())
    fitting = [name for name in shared if saved[name].shape == here[name].shape]
    matched = Matched(
        taken=tuple(fitting),
        only_here=tuple(sorted(here.keys() - saved.keys())),
        only_there=tuple(sorted(saved.keys() - here.keys())),
        other_shape=tuple(name for name in shared if name not in set(fitting)),
    )
    problems = _problems(matched) if strict else []
    if not fitting or problems:
        found = "; ".join(problems) or f"no weight matches {match}"
        raise CheckpointError(
            f"init_from={source}: {found}; see init_match, or set init_strict=false to take what fits"
        )
    with torch.no_grad():
        for name in fitting:
            here[name].copy_(saved[name])
    log.info("began with %d of %d weights from %s: %s", len(fitting), len(here), source, listed(fitting, shown=SHOWN))
    for problem in _problems(matched):
        log.info("left as they were: %s", problem)
    return matched


def read_weights(source: Path) -> Mapping[str, Any]:
    """Named tensors, on the CPU; under names of extra state whatever the modules gave.

    Raises:
        CheckpointError: they can't be read.
    """
    if source.is_dir():
        return load(_checkpoint(source)).model
    try:
        if source.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(source))
        found = torch.load(source, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise CheckpointError(f"{source}: pip install safetensors to read it") from error
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{source} can't be read: {error}") from error
    if not isinstance(found, Mapping) or not all(map(_is_of_a_module, found.items())):
        raise CheckpointError(f"{source} should hold tensors by name, as torch.save(model.state_dict()) writes them")
    return found


def _is_of_a_module(item: tuple[Any, Any]) -> bool:
    name, value = item
    return isinstance(value, Tensor) or str(name).endswith(_EXTRA_STATE_KEY_SUFFIX)


def _wanted(values: Mapping[str, Any], match: str) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor) and fnmatchcase(name, match)}


def _checkpoint(folder: Path) -> Path:
    directory = RunDirectory.at(folder)
    if not directory.config.exists():
        return folder
    newest, _ = newest_intact(directory)
    if newest is None:
        raise CheckpointError(f"{folder} is a run without an intact checkpoint")
    return newest.path


def _problems(matched: Matched) -> list[str]:
    kinds = {
        "only in the model": matched.only_here,
        "only in the source": matched.only_there,
        "of another shape": matched.other_shape,
    }
    return [f"{kind}: {listed(names, shown=SHOWN)}" for kind, names in kinds.items() if names]
