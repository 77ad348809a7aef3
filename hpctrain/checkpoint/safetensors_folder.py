"""Write weights as a folder of safetensors files, with the names that Hugging Face's libraries expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hpctrain.checkpoint.safetensors_file import write_safetensors
from hpctrain.checkpoint.weight_stream import WeightStream
from hpctrain.files import fsync_directory, write_atomic

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of the files; others in such a folder, such as config.json, are the user's."""


def write_folder(
    path: Path, weights: Mapping[str, WeightStream], max_bytes: int, on_write: Callable[[int], None]
) -> None:
    """Fill an empty folder, and make its files durable.

    Weights that fit into one file are `model.safetensors`. Others are files that are numbered from 1, with an index
    that has the sum of the tensors' bytes (`metadata.total_size`) and the file of each tensor (`weight_map`).

    Args:
        path: of the folder.
        weights: by name; the files have them in this order.
        max_bytes: bytes of a file's tensors; a larger tensor has a file of its own.
        on_write: called with the number of bytes after each write.

    Raises:
        CheckpointError: the format lacks the type of a tensor.
        OSError: a file can't be written; a part of it may be left.
    """
    groups = list(_groups(weights, max_bytes))
    if len(groups) == 1:
        write_safetensors(path / SINGLE, weights, on_write)
    else:
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        for name, group in zip(names, groups, strict=True):
            write_safetensors(path / name, group, on_write)
        index = {
            "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
            "weight_map": {each: name for name, group in zip(names, groups, strict=True) for each in group},
        }
        write_atomic(path / INDEX, json.dumps(index, indent=2, ensure_ascii=False) + "\n")
    fsync_directory(path)


def publish_folder(written: Path, path: Path) -> None:
    """Give a folder its name, or replace the weights in an existing one, and leave its other files as they are.

    Args:
        written: next to ``path``, filled by `write_folder`.
        path: a folder, or nothing.
    """
    if path.is_dir() and any(path.iterdir()):
        # the index first and last: without it, no reader takes files of two models for one
        for file in sorted(weight_files(path), key=_is_no_index):
            file.unlink()
        for file in sorted(written.iterdir(), key=_is_no_index, reverse=True):
            file.replace(path / file.name)
        written.rmdir()
        fsync_directory(path)
    else:
        written.replace(path)
    fsync_directory(path.parent)


def weight_files(path: Path) -> list[Path]:
    """Return the files in a folder that hold weights, and their index."""
    return [file for file in path.iterdir() if WEIGHTS.fullmatch(file.name)]


def _is_no_index(file: Path) -> bool:
    return file.name != INDEX


def _groups(weights: Mapping[str, WeightStream], max_bytes: int) -> Iterator[dict[str, WeightStream]]:
    group: dict[str, WeightStream] = {}
    size = 0
    for name, weight in weights.items():
        if group and size + weight.nbytes > max_bytes:
            yield group
            group, size = {}, 0
        group[name] = weight
        size += weight.nbytes
    yield group
