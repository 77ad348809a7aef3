"""Files that are complete or absent: atomic writes, durable writes, JSON lines.

The protocol of a durable publish: write under a temporary name in the same directory, fsync the file, rename it over
the final name, fsync the directory (POSIX rename(2); "All File Systems Are Not Created Equal", OSDI 2014).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import RunDirectoryError

TEMPORARY_PREFIX = ".tmp-"
"""Names that start so are being written; what a crash leaves of them may be removed."""


def temporary_name(path: Path) -> Path:
    """A name beside ``path`` that no other writer uses."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")


def fsync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace ``path`` by ``content``, or leave it as it was.

    Args:
        path: the file; its directory exists.
        content: the whole new content; text is written as UTF-8.
        durable: also wait until a power failure can't undo it.

    Raises:
        OSError: what the file system said; nothing is left under a temporary name.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_name(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong first is what the caller has to know
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def write_json(path: Path, record: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write one JSON object, indented, atomically."""
    write_atomic(path, json.dumps(record, indent=2) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        FileNotFoundError: there is no such file.
        RunDirectoryError: it holds something else than a JSON object.
    """
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunDirectoryError(f"{path} should hold a JSON object, but can't be read: {error}") from error
    if not isinstance(record, dict):
        raise RunDirectoryError(f"{path} should hold a JSON object, but holds a {type(record).__name__}")
    return record


def append_json_line(path: Path, record: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one record in a single write; a torn last line of an earlier crash is closed first.

    Raises:
        OSError: what the file system said; no part of a record is left for which there was no room.
    """
    data = (json.dumps(record) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        _write_all(descriptor, data)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all or nothing: where a disk is nearly full, the kernel writes a part, and refuses the next one only."""
    written = os.write(descriptor, data)
    if written == len(data):
        return
    before = os.lseek(descriptor, 0, os.SEEK_CUR) - written  # where it was appended, whoever else appends
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        with contextlib.suppress(OSError):  # what went wrong first is what the caller has to know
            if os.fstat(descriptor).st_size == before + written:
                os.ftruncate(descriptor, before)
        raise


def read_json_lines(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines, oldest first; lines that a crash tore are passed over.

    Yields nothing where there is no such file.

    Args:
        path: the file.
        last_bytes: read only this much of the end; None reads the whole file.
    """
    try:
        with path.open("rb") as file:
            if last_bytes is not None:
                # the seek is likely to land within a line; what is left of that line isn't valid JSON
                file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
            data = file.read()
    except FileNotFoundError:
        return
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
