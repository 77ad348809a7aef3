"""Read the tensors that a program saved: files of torch, safetensors and NumPy, DCP's folders, and folders of these."""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from hpctrain.checkpoint.restricted_pickle import UnknownObject, load, load_plain

TORCH = (".pt", ".pth", ".ckpt", ".bin", ".tar")
PICKLE = (".pkl", ".pickle")
NUMPY = (".npy", ".npz")
SWAPPED = ">" if sys.byteorder == "little" else "<"
"""How NumPy's pickles mark the other byte order."""
SAFETENSORS = ".safetensors"
MAX_NUMBERS = 100_000
"""Numbers of a file that are compared; more would be data that belong into a tensor."""
MAX_EXPANDED_BYTES = 2**32
"""Size to which a view may expand its data; the comparison copies it."""


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """The contents of one file, or of one folder of DCP.

    Attributes:
        tensors: functions that read a tensor, by its name.
        numbers: those that aren't in tensors, such as a learning rate, by name.
    """

    tensors: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def is_useful(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.tensors or self.numbers)

    def add(self, value: object, name: str = "") -> None:
        """Add all tensors and numbers in a value that was unpickled, such as a dictionary of dictionaries."""
        visited_ids: set[int] = set()
        queue: list[tuple[str, object]] = [(name, value)]
        while queue:
            name, value = queue.pop()
            if isinstance(value, UnknownObject) and (array := _unpickled_array(value)) is not None:
                value = _from_numpy(array)
            if isinstance(value, torch.Tensor):
                for part, tensor in _plain(value):
                    self.tensors[_unused(f"{name}{part}" or "tensor", self.tensors)] = tensor.detach
            elif isinstance(value, int | float):
                if len(self.numbers) < MAX_NUMBERS:
                    self.numbers[_unused(name or "number", self.numbers)] = value
            elif id(value) not in visited_ids:
                visited_ids.add(id(value))
                queue += [(f"{name}.{key}" if name else str(key), inner) for key, inner in _inside(value)]


def parts_of(save: Path) -> dict[str, Path]:
    """The files of a save, and its folders of DCP, by their path relative to it; a file's own is empty."""
    if save.is_file() or is_distributed(save):
        return {"": save}
    parts: dict[str, Path] = {}
    for path in sorted(save.iterdir()):
        # neither a link to a folder, such as `latest`, nor one that leads nowhere, nor a pipe
        if not (path.is_file() or (path.is_dir() and not path.is_symlink())):
            continue
        for name, part in parts_of(path).items():
            parts[f"{path.name}/{name}" if name else path.name] = part
    return parts


def read_part(path: Path) -> SavedTensors | None:
    """Read the tensors of a file or of a folder of DCP; None if it is a file of another kind.

    Raises:
        Exception: of any kind, if it can't be read.
    """
    saved = SavedTensors()
    if path.is_dir():
        folder = DistributedFolder(path)
        saved.tensors.update({name: partial(folder.tensor, name) for name in folder.tensors})
        for name in folder.objects:
            saved.add(folder.object(name), name)
    elif path.suffix == SAFETENSORS:
        saved.tensors.update(_safetensors(path))
    elif path.suffix in NUMPY:
        _add_arrays(saved, path)
    elif path.suffix in TORCH or _is_torch_archive(path):
        saved.add(load(path))
    elif path.suffix in PICKLE:
        with path.open("rb") as file:
            saved.add(load_plain(file))
    else:
        return None
    return saved


def _is_torch_archive(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())


def _safetensors(path: Path) -> dict[str, Callable[[], torch.Tensor]]:
    from safetensors import safe_open

    file: Any = safe_open(str(path), framework="pt")
    return {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def _add_arrays(saved: SavedTensors, path: Path) -> None:
    # an archive of NumPy's reads an array only when it is asked for
    arrays = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
    if isinstance(arrays, np.ndarray):
        saved.tensors["array"] = partial(_from_numpy, arrays)
    else:
        saved.tensors.update({name: partial(_read_array, arrays, name) for name in arrays.files})


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    array = np.array(array, dtype=array.dtype.newbyteorder("="))  # writable and native, as torch wants it
    try:
        return torch.from_numpy(array)
    except TypeError:  # such as texts and records: only their bytes can be compared
        return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)


def _read_array(archive: Any, name: str) -> torch.Tensor:
    return _from_numpy(archive[name])


def _inside(value: object) -> Iterator[tuple[object, object]]:
    """Yield the names and values in a container."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, UnknownObject):
        yield from enumerate(value.arguments)
        yield from enumerate(value.items)
        yield from value.entries.items()
        if isinstance(value.state, Mapping):
            yield from value.state.items()
        elif value.state is not None:
            yield "state", value.state
    elif isinstance(value, torch.UntypedStorage):
        yield "storage", torch.empty(0, dtype=torch.uint8).set_(value)
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)


def _unpickled_array(value: UnknownObject) -> np.ndarray[Any, Any] | None:
    """Build NumPy's array or scalar from its pickle; None if it is something else, or has Python objects."""
    if value.made_by.endswith("multiarray._reconstruct") and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, dtype, is_fortran, data = value.state
    elif value.made_by.endswith("multiarray.scalar") and len(value.arguments) == 2:
        (dtype, data), shape, is_fortran = value.arguments, (), False
    elif value.made_by.endswith("numeric._frombuffer") and len(value.arguments) == 4:
        data, dtype, shape, order = value.arguments
        is_fortran = order == "F"
    else:
        return None
    kind = _dtype(dtype)
    if kind is None or not isinstance(data, bytes | bytearray) or math.prod(shape) * kind.itemsize != len(data):
        return None
    return np.frombuffer(data, kind).reshape(shape, order="F" if is_fortran else "C")


def _dtype(value: object) -> np.dtype[Any] | None:
    if not isinstance(value, UnknownObject) or not value.arguments:
        return None
    name = str(value.arguments[0])
    if name[:1] not in "biufc":
        return None
    is_swapped = isinstance(value.state, tuple) and value.state[1:2] == (SWAPPED,)
    return np.dtype(name).newbyteorder("S") if is_swapped else np.dtype(name)


def _plain(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dense tensors of which a tensor consists, with endings for its name."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        # without using the indices, which nothing has verified
        yield ".indices", tensor._indices()
        yield ".values", tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from ((".rows", tensor.crow_indices()), (".columns", tensor.col_indices()), (".values", tensor.values()))
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from ((".columns", tensor.ccol_indices()), (".rows", tensor.row_indices()), (".values", tensor.values()))
    elif tensor.layout is not torch.strided:
        yield "", tensor.to_dense()
    else:
        stored = tensor.untyped_storage().nbytes()
        if tensor.nbytes > max(MAX_EXPANDED_BYTES, stored):
            raise ValueError(f"expands {stored} bytes to a tensor of {tensor.nbytes} bytes")
        yield "", tensor.int_repr() if tensor.is_quantized else tensor


def _unused(name: str, names: Mapping[str, object]) -> str:
    # such as that of a key "a.b", and of "b" in a dictionary "a"
    while name in names:
        name += "'"
    return name


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
        descriptions: dict[str, UnknownObject] = metadata.get("state_dict_metadata")
        self._descriptions = descriptions
        self.tensors = [name for name, description in descriptions.items() if description.get("chunks") is not None]
        self.objects = [name for name in descriptions if name not in set(self.tensors)]
        self._stored: dict[str, list[tuple[UnknownObject, UnknownObject]]] = {}
        for index, place in metadata.get("storage_data").items():
            self._stored.setdefault(index.get("fqn"), []).append((index, place))

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor, from the chunks of all ranks.

        Raises:
            Exception: of any kind, if it can't be read.
        """
        description = self._descriptions[name]
        # the first of the properties' state, which isn't a dictionary
        tensor = torch.empty(description.get("size"), dtype=description.get("properties").state[0])
        num_read = 0
        # a tensor without elements may have no chunks
        for index, place in self._stored.get(name, ()):
            chunk = self._read(place)
            target = tensor
            for dimension, offset in enumerate(index.get("offset") or ()):
                target = target.narrow(dimension, offset, chunk.shape[dimension])
            target.copy_(chunk)
            num_read += chunk.numel()
        if num_read < tensor.numel():
            raise ValueError(f"{name} has {tensor.numel()} elements, and the folder contains {num_read} of them")
        return tensor

    def object(self, name: str) -> Any:
        """Read another object.

        Raises:
            Exception: of any kind, if it can't be read.
        """
        return self._read(self._stored[name][0][1])

    def _read(self, place: UnknownObject) -> Any:
        if place.get("transform_descriptors"):
            raise ValueError(f"{place.get('relative_path')} is compressed by an extension of DCP")
        name = PurePosixPath(str(place.get("relative_path")))
        if name.is_absolute() or ".." in name.parts or not (self._path / name).is_file():
            raise ValueError(f"{name} isn't a file of the folder")
        with (self._path / name).open("rb") as file:
            file.seek(place.get("offset"))
            return load(io.BytesIO(file.read(place.get("length"))))
