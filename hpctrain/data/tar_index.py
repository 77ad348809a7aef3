"""Index of the files in a tar file: their places, found once and stored beside it.

It is made when it is first needed: for DALI's index files, a user would have to run another tool first.
"""

from __future__ import annotations

import io
import logging
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from hpctrain.data.keyed_random import IntArray
from hpctrain.errors import TaskError
from hpctrain.files import open_file, write_atomic

log = logging.getLogger("hpctrain.data")

SUFFIX = ".index"
BLOCK_BYTES = tarfile.BLOCKSIZE
MAX_EXTENSIONS = 2**16
"""Extensions in a tar file, as `TarIndex.kinds` counts them."""

_FORMAT = 2
_CHUNK_BYTES = 2**20
_CHUNKS_AFTER_END = 64
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")
_META = re.compile(r"__[^/]*__(/|$)")


@dataclass(frozen=True, slots=True)
class TarIndex:
    """The samples of a tar file, as WebDataset defines them: consecutive files with the same path up to the first dot.

    Attributes:
        extensions: of the files, in lower case: all that follows the first dot of the name.
        kinds: uint16 of shape [num_files], the extension of each file.
        offsets: int64 of shape [num_files], the first byte of each file's content.
        sizes: int64 of shape [num_files], in bytes.
        firsts: int64 of shape [num_samples + 1], the first file of each sample, and at the end the number of files.
        keys: uint8, the samples' keys as UTF-8, one after the other.
        key_ends: int64 of shape [num_samples], the end of each key.
        state: int64 of shape [3]: the format's version, and the size in bytes and the time of change in ns of the tar
            file.
    """

    extensions: npt.NDArray[np.str_]
    kinds: npt.NDArray[np.uint16]
    offsets: IntArray
    sizes: IntArray
    firsts: IntArray
    keys: npt.NDArray[np.uint8]
    key_ends: IntArray
    state: IntArray

    def __len__(self) -> int:
        return len(self.key_ends)

    def key(self, sample: int) -> str:
        """The key of a sample: the path of its files without their extensions."""
        begin = self.key_ends[sample - 1] if sample else 0
        return self.keys[begin : self.key_ends[sample]].tobytes().decode(errors="surrogateescape")

    def files(self, sample: int) -> Iterator[tuple[str, int, int]]:
        """Extension, offset and size of the files of a sample."""
        for file in range(self.firsts[sample], self.firsts[sample + 1]):
            yield str(self.extensions[self.kinds[file]]), int(self.offsets[file]), int(self.sizes[file])


_DTYPES = {
    "extensions": np.dtype(np.str_),
    "kinds": np.dtype(np.uint16),
    **dict.fromkeys(("offsets", "sizes", "firsts", "key_ends", "state"), np.dtype(np.int64)),
    "keys": np.dtype(np.uint8),
}


def index_of(path: Path, folder: Path | None = None) -> TarIndex:
    """Read the index of a tar file; make it if there is none, or if the file has changed since.

    Args:
        path: of the tar file.
        folder: of the indices; None: that of the tar file.

    Raises:
        TaskError: the tar file can't be read, is damaged or compressed, or has links for files, or the index can't be
            written.
    """
    index_path = _index_path(path, folder)
    try:
        state = _file_state(path)
        index = _read(index_path, state)
        if index is not None:
            return index
        log.info("indexing %s", path)
        with open_file(path) as file:
            index = _scan(path, file, state)
    except OSError as error:
        raise TaskError(f"{path} can't be read ({error.strerror}): check the name and its permissions") from error
    _write(index_path, index)
    return index


def _index_path(path: Path, folder: Path | None) -> Path:
    if folder is None:
        return path.with_name(path.name + SUFFIX)
    # tar files in several folders may share a name
    origin = xxhash.xxh3_64_hexdigest(os.fsencode(path.parent.absolute()))[:8]
    return folder / f"{path.name}-{origin}{SUFFIX}"


def _file_state(path: Path) -> IntArray:
    status = path.stat()
    return np.array([_FORMAT, status.st_size, status.st_mtime_ns])


def _read(index_path: Path, state: IntArray) -> TarIndex | None:
    try:
        with open_file(index_path) as file, np.load(file, allow_pickle=False) as arrays:
            # compressed, a small file could fill the memory
            if any(entry.compress_type for entry in arrays.zip.infolist()):
                raise ValueError("it is compressed")
            index = TarIndex(**arrays)
        problem = _describe_mistake(index)
    except FileNotFoundError:
        return None
    except Exception as error:  # zip raises many kinds for a damaged file
        problem = f"{type(error).__name__}: {error}"
    if problem:
        # if it can't be made anew, `_write` says so
        log.info("the index %s can't be used: %s", index_path, problem)
        return None
    return index if np.array_equal(index.state, state) else None


def _describe_mistake(index: TarIndex) -> str:
    """Describe what is wrong with an index, which others may have written; empty if nothing is."""
    for name, dtype in _DTYPES.items():
        array = getattr(index, name)
        if array.dtype.kind != dtype.kind or array.ndim != 1 or (dtype.itemsize and array.dtype != dtype):
            return f"{name} is an array of {array.dtype} with {array.ndim} dimensions"
    files, samples = len(index.kinds), len(index.key_ends)
    if len(index.state) != 3 or not files or not samples or {len(index.offsets), len(index.sizes)} != {files}:
        return "the lengths of its arrays don't match"
    checks = {
        "samples": len(index.firsts) == samples + 1
        and index.firsts[0] == 0
        and index.firsts[-1] == files
        and np.all(index.firsts[1:] > index.firsts[:-1]),
        "keys": index.key_ends[0] >= 0
        and index.key_ends[-1] == len(index.keys)
        and np.all(index.key_ends[1:] >= index.key_ends[:-1]),
        "extensions": index.kinds.max() < len(index.extensions),
        "places": index.offsets.min() >= 0
        and index.sizes.min() >= 0
        and np.all(index.offsets <= index.state[1] - index.sizes),
    }
    return next((f"its {what} can't be those of the tar file" for what, passed in checks.items() if not passed), "")


def _write(index_path: Path, index: TarIndex) -> None:
    content = io.BytesIO()
    np.savez(content, **{name: getattr(index, name) for name in TarIndex.__slots__})
    try:
        index_path.parent.mkdir(parents=True, exist_ok=True)
        # atomic: other nodes may make it at the same time
        write_atomic(index_path, content.getvalue(), durable=False)
    except OSError as error:
        raise TaskError(
            f"the index {index_path} can't be written ({error.strerror}): name a folder for it, "
            "TarDataset(index=FOLDER)"
        ) from error


def _scan(path: Path, file: BinaryIO, state: IntArray) -> TarIndex:
    extensions: dict[str, int] = {}
    kinds: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    firsts: list[int] = []
    key_ends: list[int] = []
    keys = bytearray()
    current: str | None = None
    in_sample: set[str] = set()
    for member in _members(path, file):
        name = _NAME.fullmatch(member.name)
        if name is None or _META.match(member.name):
            continue
        if not member.isreg():
            raise TaskError(_link_message(path, member))
        key, extension = name[1], name[2].lower()
        if key != current:
            current = key
            in_sample.clear()
            keys += key.encode(errors="surrogateescape")
            key_ends.append(len(keys))
            firsts.append(len(kinds))
        if extension in in_sample:
            raise TaskError(f"{path} has {key}.{extension} twice, again at byte {member.offset}: make it anew")
        in_sample.add(extension)
        kinds.append(extensions.setdefault(extension, len(extensions)))
        if len(extensions) > MAX_EXTENSIONS:
            raise TaskError(
                f"{path} has more than {MAX_EXTENSIONS} extensions, such as {extension} of {member.name}: a sample's "
                "key ends at the first dot of the name, so replace that dot, as in img-000001.txt"
            )
        offsets.append(member.offset_data)
        sizes.append(member.size)
    if not key_ends:
        raise TaskError(f"{path} has no samples: expected files such as 000.jpg and 000.cls")
    return TarIndex(
        extensions=np.array(list(extensions)),
        kinds=np.array(kinds, np.uint16),
        offsets=np.array(offsets, np.int64),
        sizes=np.array(sizes, np.int64),
        firsts=np.array([*firsts, len(kinds)], np.int64),
        keys=np.frombuffer(bytes(keys), np.uint8),
        key_ends=np.array(key_ends, np.int64),
        state=state,
    )


def _members(path: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The regular files and the links.

    Raises:
        TaskError: the tar file is damaged, compressed or sparse.
    """
    offset, end = 0, os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                # Python 3.14 passes over a header whose size is negative
                if member.offset != offset and not _is_global_header(file, offset):
                    raise tarfile.ReadError(f"the next file that can be read, {member.name}, is at {member.offset}")
                # a forged size may be negative, and lead back
                if not offset < tar.offset or not 0 <= member.size <= end - member.offset_data:
                    raise tarfile.ReadError(f"{member.name} has the size {member.size}")
                offset = tar.offset
                tar.members.clear()  # type: ignore[attr-defined]  # they would fill the memory
                if member.issparse():
                    raise TaskError(f"{path} has the sparse file {member.name} at byte {member.offset}: make it anew")
                if member.isreg() or member.islnk() or member.issym():
                    yield member
    except (OSError, TaskError):
        raise
    except Exception as error:  # tarfile raises many kinds for a damaged header
        file.seek(0)
        if file.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5"):
            raise TaskError(f"{path} is compressed, so it can't be read by position: decompress it") from None
        raise TaskError(_damage_message(path, offset, str(error) or type(error).__name__)) from None
    _check_end(path, file, offset)


def _is_global_header(file: BinaryIO, offset: int) -> bool:
    """Whether a header for all files begins there, as in archives of git: it counts for none of them."""
    file.seek(offset)
    return tarfile.TarInfo.frombuf(file.read(BLOCK_BYTES), "utf-8", "surrogateescape").type == tarfile.XGLTYPE


def _check_end(path: Path, file: BinaryIO, offset: int) -> None:
    """Check that zeros follow the last file: tarfile also stops at a damaged header, and at the end of what it has."""
    file.seek(offset)
    block = file.read(BLOCK_BYTES)
    if block.strip(b"\0"):
        raise TaskError(_damage_message(path, offset, "no header where the next file should begin"))
    if len(block) < BLOCK_BYTES:
        raise TaskError(_damage_message(path, offset, "no end marker"))
    # a sparse file may have terabytes of zeros
    for _ in range(_CHUNKS_AFTER_END):
        block = file.read(_CHUNK_BYTES)
        if block.strip(b"\0"):
            raise TaskError(
                f"{path} has more data after its end at byte {offset}: if cat joined several tar files, name them "
                "separately, or join them with tar --concatenate"
            )


def _link_message(path: Path, member: tarfile.TarInfo) -> str:
    kind = "hard" if member.islnk() else "symbolic"
    return (
        f"{path} has a {kind} link at byte {member.offset}, {member.name} to {member.linkname}, rather than a file: "
        "make it anew with tar --dereference --hard-dereference"
    )


def _damage_message(path: Path, offset: int, how: str) -> str:
    return f"{path} is damaged or cut short at byte {offset} ({how}): copy it again, or make it anew"
