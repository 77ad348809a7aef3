"""Read a folder of `torch.distributed.checkpoint` (DCP) in one process, without executing anything."""

from __future__ import annotations

import io
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from hpctrain.checkpoint.restricted_pickle import Placeholder, load, load_plain

METADATA = ".metadata"


def is_distributed(path: Path) -> bool:
    """Whether a path is a folder of DCP."""
    return (path / METADATA).is_file()


class DistributedFolder:
    """One checkpoint of DCP, whatever number of ranks wrote it.

    DCP's own reader unpickles the metadata and all objects, and so executes what they say.

    Args:
        path: the folder.

    Attributes:
        tensors: names of its tensors.
        objects: names of its other objects.

    Raises:
        Exception: of any kind, if its metadata can't be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with (path / METADATA).open("rb") as file:
            metadata = load_plain(file)
        described: dict[str, Placeholder] = metadata.get("state_dict_metadata")
        self._described = described
        self.tensors = [name for name, one in described.items() if one.get("chunks") is not None]
        self.objects = [name for name in described if name not in set(self.tensors)]
        self._stored: dict[str, list[tuple[Placeholder, Placeholder]]] = {}
        for index, place in metadata.get("storage_data").items():
            self._stored.setdefault(index.get("fqn"), []).append((index, place))

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor, from the chunks of all ranks.

        Raises:
            Exception: of any kind, if it can't be read.
        """
        described = self._described[name]
        # the first of the properties' state, which isn't a dictionary
        whole = torch.empty(described.get("size"), dtype=described.get("properties").state[0])
        read = 0
        # a tensor without elements may have no chunks
        for index, place in self._stored.get(name, ()):
            chunk = self._read(place)
            target = whole
            for dimension, offset in enumerate(index.get("offset") or ()):
                target = target.narrow(dimension, offset, chunk.shape[dimension])
            target.copy_(chunk)
            read += chunk.numel()
        if read < whole.numel():
            raise ValueError(f"{name} has {whole.numel()} elements, and the folder contains {read} of them")
        return whole

    def object(self, name: str) -> Any:
        """Read another object.

        Raises:
            Exception: of any kind, if it can't be read.
        """
        return self._read(self._stored[name][0][1])

    def _read(self, place: Placeholder) -> Any:
        if place.get("transform_descriptors"):
            raise ValueError(f"{place.get('relative_path')} is compressed by an extension of DCP")
        name = PurePosixPath(str(place.get("relative_path")))
        if name.is_absolute() or ".." in name.parts or not (self._path / name).is_file():
            raise ValueError(f"{name} isn't a file of the folder")
        with (self._path / name).open("rb") as file:
            file.seek(place.get("offset"))
            return load(io.BytesIO(file.read(place.get("length"))))
