"""Files that are complete or absent, and files that others can write: atomic and durable writes, JSON, JSON lines.

Other users who may write into a run can put anything in place of a file. So this module reads only regular files of a
bounded size, and JSON of a bounded depth in valid Unicode.

The protocol of a durable publish: write under a temporary name in the same directory, fsync the file, rename it over
the final name, fsync the directory (POSIX rename(2); "All File Systems Are Not Created Equal", OSDI 2014).
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from hpctrain.errors import RunDirectoryError

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of files that are still being written; those that a crash leaves may be removed."""

LARGEST_BYTES = 64 * 2**20
"""Size up to which a file of records is read: hpctrain writes none that is larger, except metrics and media."""
LARGEST_LOG_BYTES = 2**36
"""Size up to which a file of metrics, saves or samples is read, record by record; by its own run at any size."""
DEEPEST = 100
"""Levels of nested lists and objects: writing or comparing much deeper ones overflows the stack."""
_LONGEST_LINE = 2**24
_BLOCK = 2**20
_DECODER = json.JSONDecoder()
_SURROGATES = re.compile(
    # an escaped backslash, or a pair: one character
    r"(?P<whole>\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    # what stands for a byte of a path that isn't UTF-8 (PEP 383) stays
    r"|\\u[dD](?![cC][89a-fA-F])[89a-fA-F][0-9a-fA-F]{2}"
)

THREADS = 16
"""Threads for many small files on a file system that answers slowly."""
PROBED = 32
"""Files that are handled first, to find out how fast the file system answers."""
SLOW_S = 2e-3
"""Seconds per file from which threads save time: on a local disk they wait for each other instead."""

T = TypeVar("T")
R = TypeVar("R")


def describe_os_error(error: OSError) -> str:
    """The file and the problem, without the number."""
    return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror or error)


@contextlib.contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Context manager in which an OSError names a file: those of write(2), fsync(2) and close(2) name none.

    Args:
        path: the file; it also stands for its temporary one.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or Path(str(error.filename)).name.startswith(f"{TEMPORARY_PREFIX}{path.name}-"):
            error.filename = str(path)
            del error.filename2  # with None, the text would end with it
        raise


def temporary_name(path: Path) -> Path:
    """A name in the directory of ``path`` that no other writer uses."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")


def fsync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with errors_naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(
    path: Path, content: str | bytes | Iterable[bytes], *, durable: bool = True, mode: int = 0o666
) -> None:
    """Replace the content of a file, or leave it as it was.

    Args:
        path: the file; its directory exists.
        content: the whole new content, perhaps in parts; text is written as UTF-8.
        durable: also wait until the content survives a power failure.
        mode: the file's permissions, of which the umask takes some away.

    Raises:
        OSError: the file system's error, which names ``path``; no temporary file is left.
    """
    if isinstance(content, str):
        content = content.encode()
    temporary = temporary_name(path)
    try:
        with errors_naming(path):
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the caller needs the first error
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def write_new(path: Path, content: str, *, mode: int = 0o666) -> bool:
    """Write a file that must not exist yet, durably; of several processes that do so at once, one succeeds.

    A link fails if its name is taken, and a rename doesn't (POSIX link(2), atomic on NFS).

    Args:
        path: the file; its directory exists.
        content: the whole content.
        mode: as for `write_atomic`.

    Returns:
        Whether this call wrote it; not if the name is taken.

    Raises:
        OSError: as from `write_atomic`.
    """
    temporary = temporary_name(path)
    with errors_naming(path):
        write_atomic(temporary, content, mode=mode)
        try:
            os.link(temporary, path)
        except FileExistsError:
            # NFS repeats a request whose answer was lost, and then reports that the name is taken: by this file
            if temporary.stat().st_nlink != 2:
                return False
        finally:
            temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True


def write_json(path: Path, record: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write one JSON object, indented, atomically."""
    write_atomic(path, json.dumps(record, indent=2) + "\n", durable=durable)


class IrregularFileError(OSError):
    """A directory, a pipe, a device, or a file that is too large stands in the place of a file."""


def parse_json(data: bytes) -> Any:
    """Parse JSON that others can write.

    Lone surrogates become U+FFFD: no encoder takes them. Those that stand for a byte of a path stay.

    Raises:
        ValueError: it isn't JSON in UTF-8, or is nested more than `DEEPEST` levels deep.
    """
    text = data.decode().strip(" \t\r\n")
    if "\\ud" in text or "\\uD" in text:
        text = _SURROGATES.sub(lambda match: match["whole"] or "\ufffd", text)
    try:
        # faster than json.loads: a report reads many records
        value, end = _DECODER.raw_decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    # most records have fewer brackets than levels are allowed
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inside = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [inner for node in inside for inner in node if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``.

    Raises:
        FileNotFoundError: the file doesn't exist.
        IrregularFileError: it isn't a regular file, or larger than `LARGEST_BYTES`.
        RunDirectoryError: it doesn't hold a JSON object.
    """
    try:
        record = parse_json(read_bytes(path))
    except ValueError as error:
        raise RunDirectoryError(f"{path}: expected a JSON object, but can't parse it: {error}") from error
    if not isinstance(record, dict):
        raise RunDirectoryError(f"{path}: expected a JSON object, got a {type(record).__name__}")
    return record


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes, and no pipe or device, which could block its reader or never end.

    Raises:
        OSError: the file system's error; `IrregularFileError` if ``path`` isn't a regular file.
    """
    return os.fdopen(_open_regular(path), "rb")


def read_bytes(path: Path, *, last_bytes: int | None = None, at_most: int = LARGEST_BYTES) -> bytes:
    """Read a file, or only its last bytes.

    Args:
        path: the file.
        last_bytes: None reads the whole file.
        at_most: the largest size, in bytes, of a file that is read as a whole.

    Raises:
        OSError: as `open_file`; `IrregularFileError` also if the file is larger.
    """
    # without a buffer: `status` reads thousands of small files, each at once
    with io.FileIO(_open_regular(path, at_most if last_bytes is None else None)) as file:
        if last_bytes is None:
            return file.readall()
        file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        return file.read(last_bytes) or b""


def _open_regular(path: Path, at_most: int | None = None) -> int:
    """A descriptor for reading a regular file."""
    # O_NONBLOCK: a named pipe is opened without waiting for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    _require_regular(descriptor, path, at_most)
    return descriptor


def _require_regular(descriptor: int, path: Path, at_most: int | None) -> os.stat_result:
    """Return the status of a regular file that isn't too large; close and refuse any other."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (at_most is None or status.st_size <= at_most):
        return status
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise IrregularFileError(errno.EINVAL, "not a regular file", str(path))
    problem = f"it has {status.st_size} bytes, expected at most {at_most}; move it away"
    raise IrregularFileError(errno.EFBIG, problem, str(path))


def open_below(folder: Path, name: str, *, at_most: int | None = None) -> BinaryIO:
    """Open a file of a folder in which other users may write; a link can't lead to this user's other files.

    Args:
        folder: as the user named it; links in its path are followed.
        name: the file's path below the folder, in which links aren't followed.
        at_most: the largest size of the file, in bytes; None for any.

    Raises:
        OSError: the file system's error; a part of the name is a link, or leads out of the folder; the file has another
            name as well, and other users could have given it this one. `IrregularFileError` if the file isn't regular,
            or is larger.
    """
    *above, last = name.split("/")
    with open_folder_below(folder, "/".join(above)) as (parent, private):
        descriptor = _open_part(last, parent, folder / name, os.O_NONBLOCK)
    state = _require_regular(descriptor, folder / name, at_most)
    if state.st_nlink > 1 and not private:
        os.close(descriptor)
        problem = "has another name (a hard link), in a folder that other users can write to; replace it by a copy"
        raise OSError(errno.EINVAL, problem, str(folder / name))
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def open_folder_below(folder: Path, name: str, *, create: bool = False) -> Iterator[tuple[int, bool]]:
    """Context manager that opens a folder below another one, if no part of its name is a link.

    Args:
        folder: as for `open_below`.
        name: the inner folder's path below it; empty for the folder itself.
        create: make the folders that are missing.

    Yields:
        A descriptor of the inner folder, and whether no other user can write to any of the folders.

    Raises:
        OSError: as from `open_below`.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        private = is_private(os.fstat(descriptor))
        for part in filter(None, name.split("/")):
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            inner = _open_part(part, descriptor, folder / name, os.O_DIRECTORY)
            os.close(descriptor)
            descriptor = inner
            private = private and is_private(os.fstat(descriptor))
        yield descriptor, private
    finally:
        os.close(descriptor)


def is_private(state: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user, and no other one can write to it."""
    return state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _open_part(part: str, folder: int, path: Path, flags: int) -> int:
    if part in ("", ".."):
        raise OSError(errno.EINVAL, "leads out of its folder", str(path))
    try:
        return os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as error:
        # ENOTDIR: of a link in the place of a folder
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(os.lstat(part, dir_fd=folder).st_mode):
            text = f"{part} is a symbolic link, which isn't followed here; replace it by what it names"
            raise OSError(errno.ELOOP, text, str(path)) from None
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``; empty if the file is missing or can't be read."""
    try:
        return read_json(path)
    except (OSError, RunDirectoryError):
        return {}


def append_json_line(path: Path, record: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one record in a single write; a line that a crash left incomplete is terminated first.

    Raises:
        OSError: the file system's error; no part of the record is left.
    """
    data = (json.dumps(record) + "\n").encode()
    with errors_naming(path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            _write_all(descriptor, missing_line_break(descriptor) + data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def missing_line_break(descriptor: int) -> bytes:
    """Return a line break if a crash left the last line of a file incomplete; else nothing."""
    size = os.fstat(descriptor).st_size
    return b"\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else b""


def _write_all(descriptor: int, data: bytes) -> None:
    num_written = os.write(descriptor, data)
    if num_written == len(data):
        return
    # on a disk that is nearly full, the kernel writes a part first and fails only the next call: undo that part
    before = os.lseek(descriptor, 0, os.SEEK_CUR) - num_written  # where it was appended, even if others append as well
    try:
        while num_written < len(data):
            num_written += os.write(descriptor, data[num_written:])
    except OSError:
        with contextlib.suppress(OSError):  # the caller needs the first error
            if os.fstat(descriptor).st_size == before + num_written:
                os.ftruncate(descriptor, before)
        raise


def read_json_lines(
    path: Path, *, last_bytes: int | None = None, at_most: int | None = LARGEST_BYTES
) -> Iterator[dict[str, Any]]:
    """Read the records of a file of JSON lines, oldest first; lines that a crash left incomplete are skipped.

    Yields nothing if the file doesn't exist.

    Args:
        path: the file.
        last_bytes: read only this many bytes at the end; None reads the whole file.
        at_most: the largest size, in bytes, of a file that is read as a whole; None for any.

    Raises:
        OSError: as `read_bytes`.
    """
    yield from json_lines(read_lines(path, last_bytes=last_bytes, at_most=at_most))


def read_lines(path: Path, *, last_bytes: int | None = None, at_most: int | None = LARGEST_BYTES) -> Iterator[bytes]:
    """Read the lines of a file, without those that are too long for a record; see `read_json_lines`.

    The last one is what follows the last line break, which may be nothing.
    """
    try:
        descriptor = _open_regular(path, at_most if last_bytes is None else None)
    except FileNotFoundError:
        return
    with io.FileIO(descriptor) as file:
        if last_bytes is not None:
            # they are likely to begin within a line; the rest of that line isn't valid JSON
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        yield from split_lines(file)


def split_lines(file: BinaryIO | io.FileIO) -> Iterator[bytes]:
    """Read the lines of an open file from its position on, as `read_lines`."""
    incomplete = b""
    while block := file.read(_BLOCK):
        *lines, incomplete = (incomplete + block).split(b"\n")
        yield from lines
        if len(incomplete) > _LONGEST_LINE:
            # the rest of such a line is skipped as it comes: its beginning makes it invalid
            incomplete = b"\0"
    yield incomplete


def json_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Parse lines of JSON; those that are incomplete, or no object, are skipped."""
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def on_each_file(act: Callable[[T], R], files: Sequence[T]) -> list[R]:
    """Call a function for each of many files, in threads if the file system is slow; return the results in order."""
    begin = time.perf_counter()
    results = [act(file) for file in files[:PROBED]]
    if time.perf_counter() - begin < SLOW_S * len(results):
        return results + [act(file) for file in files[PROBED:]]
    from concurrent.futures import ThreadPoolExecutor  # imports much, and few commands need it

    with ThreadPoolExecutor(THREADS) as pool:
        return results + list(pool.map(act, files[PROBED:]))
