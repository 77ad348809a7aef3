"""A file of torch.save, read once: compared with its checksum on the way into memory that its tensors then keep."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import xxhash
from torch import Tensor

from hpctrain.checkpoint.host_memory import huge_pages
from hpctrain.run.checkpoints import file_checksum

KEPT = "optimizer.pt"
"""Nearly all of it is written in the next step. The model's tensors are there already, and are copied into."""

MAPPED_FROM_BYTES = 16 << 20
"""Smaller files are read by torch.load: their tensors have memory of their own anyway."""

_BLOCK_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10
_LOCAL_HEADER_BYTES = 30


class Intake:
    """Reads the files of a checkpoint, and keeps the optimizer's bytes for its tensors.

    One pass from the disk takes the place of three: one that compares checksums, one that maps the file into memory,
    and one that copies it into memory which the optimizer may keep.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._bytes = memoryview(b"")

    def checksum(self, file: Path) -> str:
        """As `file_checksum`; an optimizer's file is kept, in place of an earlier one.

        Raises:
            OSError: it can't be read.
        """
        size = file.stat().st_size
        if file.name != KEPT or size < MAPPED_FROM_BYTES:
            return file_checksum(file)
        self._file, self._bytes = None, memoryview(b"")
        try:
            memory = huge_pages(size)
        except OSError:  # too little memory is no damage
            return file_checksum(file)
        digest = xxhash.xxh3_128()
        for block in self._read(file, memory):
            digest.update(block)
        return digest.hexdigest()

    def own(self, file: Path, tree: Any) -> Any:
        """What torch.load mapped from ``file``, with its tensors in memory of their own.

        Args:
            file: read before by `checksum`, or now.
            tree: of dicts, lists and tuples.

        Returns:
            The tree, its tensors sharing storages as they did; None where the file is small, or laid out as no version
            of torch that we know does it.

        Raises:
            OSError: the file can't be read, or memory doesn't suffice.
        """
        if file.stat().st_size < MAPPED_FROM_BYTES:
            return None
        if self._file != file:
            for _ in self._read(file, huge_pages(file.stat().st_size)):
                pass
        places = _places(file, self._bytes, tree)
        kept, self._file, self._bytes = self._bytes, None, memoryview(b"")
        if places is None:
            return None
        return _moved(tree, {pointer: _storage(kept, *place) for pointer, place in places.items()})

    def _read(self, file: Path, memory: memoryview) -> Iterator[memoryview]:
        """Each block as soon as it is in memory, while the processor's caches have it."""
        filled = 0
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(memory[filled : filled + _BLOCK_BYTES]):
                yield memory[filled : filled + count]
                filled += count
        self._file, self._bytes = file, memory[:filled]


def _storage(kept: memoryview, offset: int, count: int) -> Tensor:
    """Bytes of the file. Few are copied: a step's count alone shouldn't keep all the others in memory."""
    found = torch.frombuffer(kept, dtype=torch.uint8, count=count, offset=offset)
    return found.clone() if count < _SMALL_BYTES else found


def _places(file: Path, data: memoryview, tree: Any) -> dict[int, tuple[int, int]] | None:
    """Where in the file each mapped storage lies: address -> offset and length, in bytes.

    The file is mapped as one piece. So its storages follow each other as its records do, all at the same distance; that
    they do is checked.
    """
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, _tensors(tree))}
    mapped = sorted((pointer, count) for pointer, count in storages.items() if count)
    records = sorted(record for record in _records(file, data) if record[1])
    if [count for _, count in mapped] != [count for _, count in records]:
        return None
    places = {pointer: record for (pointer, _), record in zip(mapped, records, strict=True)}
    return places if len({pointer - offset for pointer, (offset, _) in places.items()}) <= 1 else None


def _records(file: Path, data: memoryview) -> Iterator[tuple[int, int]]:
    """Offset and length of each storage in a file of torch.save: a zip archive that packs nothing.

    APPNOTE.TXT of the zip format, 4.3.7: the lengths of a name and of an extra field are at 26 and 28 of its header.
    """
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if PurePosixPath(record.filename).parent.name == "data" and record.compress_type == zipfile.ZIP_STORED:
                header = data[record.header_offset : record.header_offset + _LOCAL_HEADER_BYTES]
                name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
                yield record.header_offset + _LOCAL_HEADER_BYTES + name + extra, record.file_size


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(item)


def _moved(tree: Any, storages: dict[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        storage = storages.get(tree.untyped_storage().data_ptr())
        if storage is None:  # it has no elements
            return tree.clone()
        return storage.view(tree.dtype).as_strided(tree.shape, tree.stride(), tree.storage_offset())
    if isinstance(tree, dict):
        return {key: _moved(value, storages) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [_moved(value, storages) for value in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree
