"""Start a new run from given weights; unlike a resume, which restores everything."""

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

from hpctrain.checkpoint.read import load
from hpctrain.checkpoint.state import PlainNames
from hpctrain.errors import CheckpointError
from hpctrain.phrases import listed
from hpctrain.run.checkpoints import newest_intact
from hpctrain.run.directory import RunDirectory

SHOWN = 10

log = logging.getLogger("hpctrain.checkpoint")


@dataclass(frozen=True, slots=True)
class Matched:
    """The names of the model and of the source, compared.

    Attributes:
        taken: names whose weights are copied.
        only_here: names of the model that match the pattern and are not in the source.
        only_there: names of the source that match the pattern and are not in the model.
        other_shape: names whose shapes differ.
    """

    taken: tuple[str, ...]
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    other_shape: tuple[str, ...]

    @classmethod
    def of(cls, here: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> Matched:
        """Compare the names and shapes of the model with those of the source."""
        shared = sorted(saved.keys() & here.keys())
        return cls(
            taken=tuple(name for name in shared if saved[name].shape == here[name].shape),
            only_here=tuple(sorted(here.keys() - saved.keys())),
            only_there=tuple(sorted(saved.keys() - here.keys())),
            other_shape=tuple(name for name in shared if saved[name].shape != here[name].shape),
        )

    def differences(self) -> list[str]:
        """Describe the names that aren't taken, one phrase per kind."""
        kinds = {
            "only in the model": self.only_here,
            "only in the source": self.only_there,
            "of another shape": self.other_shape,
        }
        return [f"{kind}: {listed(names, shown=SHOWN)}" for kind, names in kinds.items() if names]


def warm_start(model: nn.Module, source: Path, *, match: str = "*", strict: bool = True) -> Matched:
    """Copy weights and buffers by name; not collective: rank zero copies, and DDP sends the result to the others.

    Extra state of modules is copied only if it is a tensor.

    Args:
        model: with or without DDP's wrapper; its names are used without it.
        source: a run directory, a checkpoint's directory, or a file of named tensors.
        match: a pattern with * and ? that selects names.
        strict: whether every selected name must be in both, with the same shape.

    Raises:
        CheckpointError: nothing matches, the source can't be read, or ``strict`` is violated; the names are listed.
    """
    plain = PlainNames(model)
    saved = _selected(read_weights(source), match)
    here = _selected({plain(name): value for name, value in model.state_dict().items()}, match)
    matched = Matched.of(here, saved)
    problems = matched.differences() if strict else []
    if not matched.taken or problems:
        found = "; ".join(problems) or f"no weight matches {match}"
        raise CheckpointError(
            f"init_from={source}: {found}; see init_match, or set init_strict=false to take what fits"
        )
    with torch.no_grad():
        for name in matched.taken:
            here[name].copy_(saved[name])
    taken = listed(matched.taken, shown=SHOWN)
    log.info("started from %d of %d weights of %s: %s", len(matched.taken), len(here), source, taken)
    for difference in matched.differences():
        log.info("left as they were: %s", difference)
    return matched


def read_weights(source: Path) -> Mapping[str, Any]:
    """Read named tensors into host memory; values of extra state may be of any type.

    Raises:
        CheckpointError: the weights can't be read.
    """
    if source.is_dir():
        return load(_checkpoint_in(source)).model
    try:
        if source.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(source))
        found = torch.load(source, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise CheckpointError(f'{source} can\'t be read: pip install "hpctrain[safetensors]"') from error
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{source} can't be read: {error}") from error
    if not isinstance(found, Mapping) or not all(
        isinstance(value, Tensor) or str(name).endswith(_EXTRA_STATE_KEY_SUFFIX) for name, value in found.items()
    ):
        raise CheckpointError(f"{source} should hold tensors by name, as torch.save(model.state_dict()) writes them")
    return found


def _selected(values: Mapping[str, Any], match: str) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor) and fnmatchcase(name, match)}


def _checkpoint_in(folder: Path) -> Path:
    directory = RunDirectory.at(folder)
    if not directory.config.exists():
        return folder
    newest, _ = newest_intact(directory)
    if newest is None:
        raise CheckpointError(f"{folder} is a run without an intact checkpoint")
    return newest.path
