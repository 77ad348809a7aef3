"""Start a new run from given weights; unlike a resume, which restores everything."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from hpctrain.checkpoint.read import choose_newest, describe_unreadable, load
from hpctrain.checkpoint.restore import copy_saved, describe_difference
from hpctrain.checkpoint.state import PlainNames
from hpctrain.checkpoint.stored_tensor import StoredTensor
from hpctrain.errors import CheckpointDamagedError, CheckpointError
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory

log = logging.getLogger("hpctrain.checkpoint")


def warm_start(model: nn.Module, source: Path, *, match: str = "*", strict: bool = True) -> list[str]:
    """Copy weights and buffers by name; not collective: rank zero copies, and DDP sends the result to the others.

    Of a sharded model, each rank copies its own shards.

    Extra state of modules is copied only if it is a tensor.

    Args:
        model: with or without DDP's wrapper; its names are used without it.
        source: a run directory, a checkpoint's directory, or a file of named tensors.
        match: a pattern with * and ? that selects names.
        strict: whether every selected name must be in both, with the same shape.

    Returns:
        The names of the weights that were copied.

    Raises:
        CheckpointError: nothing matches, the source can't be read, or ``strict`` is violated; the names are listed.
    """
    plain = PlainNames(model)
    saved = _selected(read_weights(source), match)
    here = _selected({plain(name): value for name, value in model.state_dict().items()}, match)
    shared = saved.keys() & here.keys()
    names = sorted(name for name in shared if tuple(saved[name].shape) == tuple(here[name].shape))
    differences = [
        *describe_difference("only in the model", here.keys() - saved.keys()),
        *describe_difference("only in the source", saved.keys() - here.keys()),
        *describe_difference("of another shape", shared.difference(names)),
    ]
    if not names or (strict and differences):
        problem = "; ".join(differences) if strict and differences else f"no weight matches {match}"
        raise CheckpointError(
            f"init_from={source}: {problem}; see init_match, or set init_strict=false to take what fits"
        )
    for name in names:
        copy_saved(here[name], saved[name])
    log.info("started from %d of %d weights of %s: %s", len(names), len(here), source, listed(names))
    for difference in differences:
        log.info("left as they were: %s", difference)
    return names


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
        # mapped, so that a rank that needs a shard reads a shard; torch can't map files of its oldest format
        weights = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zipfile(source))
    except Exception as error:  # of any type, for a file of another kind
        raise CheckpointError(f"{source} can't be read: {describe_unreadable(error)}") from error
    if not isinstance(weights, Mapping) or not all(
        isinstance(value, Tensor) or str(name).endswith(_EXTRA_STATE_KEY_SUFFIX) for name, value in weights.items()
    ):
        raise CheckpointError(f"{source} should hold tensors by name, as torch.save(model.state_dict()) writes them")
    return weights


def _selected(values: Mapping[str, Any], match: str) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor | StoredTensor) and fnmatchcase(name, match)
    }


def _checkpoint_in(folder: Path) -> Path:
    directory = RunDirectory.at(folder)
    if not directory.config.exists():
        return folder
    try:
        newest, _ = choose_newest(directory)
    except CheckpointDamagedError:
        newest = None
    if newest is None:
        raise CheckpointError(f"{folder} is a run without an intact checkpoint")
    return newest
