"""Samples in tar files, read by position."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob, has_magic
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hpctrain.data.tar_decode import decode_by_extension
from hpctrain.data.tar_index import index_of
from hpctrain.errors import TaskError
from hpctrain.phrases import listed

MAX_OPEN = 64
"""Tar files that a process keeps open; the usual limit for all of its files is 1024."""
INDEXED_AT_ONCE = 8
"""Tar files whose headers are read at the same time: most of it is waiting for the file system."""

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class TarDataset(Dataset[Any]):
    """The samples of tar files in WebDataset's format, as a dataset with an index.

    A sample is the consecutive files of a tar file whose paths are the same up to the first dot: ``7/0042.jpg`` and
    ``7/0042.cls`` are the sample ``7/0042``. Samples are numbered in the order of the tar files. Since each can be read
    by its number, everything that holds for a dataset in memory holds: any order, any number of ranks and of loading
    processes, exact resumes; the package webdataset reads streams, and can't. Files must not change during a run.

    An index file next to each tar file has the positions of its members. The first `TarDataset` of a tar file reads the
    headers once and writes the index. Make one in `Task.prepare`, so that only one process per node does this. In
    memory, an index takes about 40 bytes per member.

    Args:
        shards: the tar files, not compressed: paths, which may have ``*``, ``?`` and ``{000..099}``, in their order;
            those that one pattern matches are sorted. A name that exists is taken literally.
        fields: the extensions of a sample, in their order, such as ("jpg;png", "cls"), where a semicolon separates
            alternatives: a sample is the tuple of their values. None: a sample is a dict of all its files' values by
            extension, and of its key as ``__key__``.
        decode: makes the value of a file from its extension and its bytes.
        transform: maps the tuple or dict to the sample; may draw from the global random generators.
        index: folder for the index files; None: next to each tar file.

    Raises:
        TaskError: there is no such tar file, or one is damaged or compressed or has links for files, or an index can't
            be written, or `fields` isn't as described.

    Example:
        ImageNet in shards::

            class ImageNet(Task):
                def prepare(self):
                    self.train_dataset()

                def train_dataset(self):
                    return TarDataset("/data/imagenet/train-{000..146}.tar", fields=("jpg", "cls"), transform=augment)
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        *,
        fields: Sequence[str] | None = None,
        decode: Callable[[str, bytes], Any] = decode_by_extension,
        transform: Callable[[Any], Any] | None = None,
        index: str | Path | None = None,
    ) -> None:
        if isinstance(fields, str):
            raise TaskError(f'fields="{fields}" is a string: write fields=("{fields}",)')
        if fields is not None and not fields:
            raise TaskError("fields=() names no extension: name some, or leave it out for all (fields=None)")
        patterns = [shards] if isinstance(shards, str | Path) else shards
        self.paths = tuple(path for pattern in patterns for path in _paths_matching(str(pattern)))
        if not self.paths:
            raise TaskError("TarDataset needs one tar file or more, got none")
        folder = None if index is None else Path(index)
        with ThreadPoolExecutor(INDEXED_AT_ONCE) as threads:
            self._indices = tuple(threads.map(lambda path: index_of(path, folder), self.paths))
        self._ends = np.array(list(accumulate(map(len, self._indices))))
        self._fields = None if fields is None else tuple(field.lower().split(";") for field in fields)
        self._decode = decode
        self._transform = transform
        self._open: OrderedDict[int, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            os.close(descriptor)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """A sample.

        Raises:
            TaskError: a field is missing, a file can't be decoded, or its tar file has changed.
        """
        shard, sample = self._locate(index)
        values = self._values(shard, sample)
        return values if self._transform is None else self._transform(values)

    def key(self, index: int) -> str:
        """The key of a sample: the path of its files without their extensions."""
        shard, sample = self._locate(index)
        return self._indices[shard].key(sample)

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"expected a sample below {len(self)}, got {index}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def _values(self, shard: int, sample: int) -> Any:
        files = {extension: (offset, size) for extension, offset, size in self._indices[shard].files(sample)}
        if self._fields is None:
            return {"__key__": self._indices[shard].key(sample)} | dict(self._decode_files(shard, sample, files))
        chosen: list[str] = []
        for names in self._fields:
            name = next((name for name in names if name in files), None)
            if name is None:
                key = self._indices[shard].key(sample)
                raise TaskError(f"{self.paths[shard]}: {key} has no .{' or .'.join(names)}, only {listed(files)}")
            chosen.append(name)
        values = dict(self._decode_files(shard, sample, {name: files[name] for name in chosen}))
        return tuple(values[name] for name in chosen)

    def _decode_files(self, shard: int, sample: int, files: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Any]]:
        begin = min(offset for offset, _ in files.values())
        data = self._read(shard, begin, max(offset + size for offset, size in files.values()) - begin)
        for extension, (offset, size) in files.items():
            try:
                yield extension, self._decode(extension, data[offset - begin : offset - begin + size])
            except TaskError:
                raise
            except Exception as error:  # decoders raise many kinds
                raise TaskError(
                    f"{self.paths[shard]}: {self._indices[shard].key(sample)}.{extension} at byte {offset} can't be "
                    f"decoded ({type(error).__name__}: {error}): replace it, or pass a decode of your own"
                ) from error

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        # pread: loading processes share the descriptors that were open at their fork, and with them the position
        data = b""
        try:
            descriptor = self._descriptor(shard)
            while len(data) < size:
                part = os.pread(descriptor, size - len(data), offset + len(data))
                if not part:
                    break
                data += part
        except OSError as error:
            raise TaskError(f"{self.paths[shard]} can't be read at byte {offset} ({error.strerror})") from error
        if len(data) < size:
            end = os.fstat(descriptor).st_size
            raise TaskError(
                f"{self.paths[shard]} ends at byte {end}, within a sample: it has changed since its index was made; "
                "copy it again"
            )
        return data

    def _descriptor(self, shard: int) -> int:
        if shard not in self._open:
            if len(self._open) >= MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[shard] = os.open(self.paths[shard], os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(shard)
        return self._open[shard]


def _paths_matching(pattern: str) -> Iterator[Path]:
    if Path(pattern).exists():
        yield Path(pattern)
        return
    match = _RANGE.search(pattern)
    if match is not None:
        first, last = match.groups()
        if int(first) > int(last):
            raise TaskError(f"the range {match[0]} of {pattern} is empty: write the smaller number first")
        for number in range(int(first), int(last) + 1):
            yield from _paths_matching(f"{pattern[: match.start()]}{number:0{len(first)}d}{pattern[match.end() :]}")
        return
    names = sorted(glob(pattern)) if has_magic(pattern) else [pattern]  # noqa: PTH207 - Path.glob needs a folder
    if not names:
        raise TaskError(f"no tar file matches {pattern}: check the path")
    yield from map(Path, names)
