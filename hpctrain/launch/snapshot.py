"""Take the code of a launch: copy it into the run or the sweep, under a name that its contents decide."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from hpctrain.config.code import Code
from hpctrain.errors import RunDirectoryError
from hpctrain.files import errors_naming, on_each_file, temporary_name
from hpctrain.launch.code_choice import CodeFiles, CodeFilesError, exclude_own_folders, too_many_bytes
from hpctrain.launch.code_files import find_code
from hpctrain.launch.code_links import Links
from hpctrain.run.code import (
    BLOCK_BYTES,
    DAMAGED,
    EXECUTABLE,
    CodeFile,
    CodeSnapshot,
    digest_of,
    link_to,
    list_of,
    mode_of,
    write_files,
)
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import explain

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
"""Errors of a file that vanished, or became something else, after it was listed."""
TRIES = 3
"""How often a file is copied anew that is written to meanwhile; then it counts as it was copied."""


@dataclass(frozen=True, slots=True)
class CodeCopy:
    """The copied code of a launch.

    Attributes:
        files: what was found.
        folder: that contains the copy.
        digest: of the copy.
        count: number of copied files.
        bytes: in them.
        set_aside: an earlier copy of the same that was damaged, under its new name.
        own_paths: see `CodeSnapshot`.
    """

    files: CodeFiles
    folder: Path
    digest: str
    count: int
    bytes: int
    set_aside: Path | None = None
    own_paths: tuple[str, ...] | None = None

    def of(self, run: RunDirectory) -> CodeSnapshot:
        """Return the copy as the code of a run."""
        files = self.files
        return CodeSnapshot(
            run=run,
            digest=self.digest,
            folder=self.folder,
            root=files.root,
            place=files.working_directory,
            own_paths=self.own_paths,
        )


def copy_code(
    folder: Path, settings: Code, home: RunDirectory, mode: int, own_folders: Sequence[str] | None = None
) -> CodeCopy | None:
    """Copy the code of a launch into the directory of a run or a sweep, which exists; None if there isn't any code.

    Args:
        folder: the working directory.
        settings: what to copy.
        home: the directory.
        mode: permissions of the run.
        own_folders: patterns of folders of which each run has its own; None if the runs share everything. With them,
            even a folder without files is copied.

    Raises:
        CodeFilesError: the code can't be found or read, or there is too much.
        RunDirectoryError: the copy can't be written.
    """
    max_bytes = settings.max_mb * 1e6
    found = find_code(Path(os.path.realpath(folder)), settings.exclude, home.path, max_bytes, settings.include)
    own_paths = None if own_folders is None else tuple(exclude_own_folders(found, own_folders))
    if own_paths is None and not found.copied:
        return None
    _require_size(found, max_bytes)
    with home.permissions(mode):
        home.close_folder(home.code, mode)
        try:
            return replace(_publish(found, home), own_paths=own_paths)
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir={home.path}: the code can't be copied there ({explain(error)}); make room, choose "
                "a folder that you may write to, or copy no code with code.snapshot=none"
            ) from error


def _require_size(found: CodeFiles, max_bytes: float) -> None:
    sizes = Counter(found.copied)
    if sizes.total() > max_bytes:
        raise too_many_bytes(found, sizes, max_bytes)


def _publish(found: CodeFiles, home: RunDirectory) -> CodeCopy:
    temporary = temporary_name(home.code / "copy")
    temporary.mkdir()
    try:
        files = _copy(found, temporary)
        folder = home.code / digest_of(files)
        write_files(list_of(temporary), files)
        list_of(temporary).replace(list_of(folder))
        copy = CodeCopy(found, folder, folder.name, len(files), sum(file.size for file in files))
        while not _renamed(temporary, folder):
            if not copy.of(home).find_damage():
                _make_folders(found, folder)
                _link(found, folder)
                break
            copy = replace(copy, set_aside=set_aside(folder) or copy.set_aside)
    finally:
        # nothing of it is left after the renaming
        _remove(temporary)
        list_of(temporary).unlink(missing_ok=True)
    return copy


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def _renamed(temporary: Path, folder: Path) -> bool:
    """Give a copy its name, unless there is one of the same name."""
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def set_aside(folder: Path) -> Path | None:
    """Rename a damaged copy, which may hold a program's outputs; None if another launch did."""
    aside = folder.with_name(f"{DAMAGED}{folder.name}-{secrets.token_hex(4)}")
    shutil.copyfile(list_of(folder), list_of(aside))
    try:
        folder.rename(aside)
    except FileNotFoundError:
        list_of(aside).unlink()
        return None
    return aside


def _copy(found: CodeFiles, target: Path) -> Sequence[CodeFile]:
    """Copy all files, and link to what isn't copied; return what was copied."""
    for folder in sorted({path.rpartition("/")[0] for path in found.copied}):
        (target / folder).mkdir(parents=True, exist_ok=True)
    (target / found.working_directory).mkdir(parents=True, exist_ok=True)
    _make_folders(found, target)
    links = Links(found)
    source, copied = os.fspath(found.root), os.fspath(target)

    def copy_one(path: str) -> CodeFile | None:
        return _copy_one(f"{source}/{path}", f"{copied}/{path}", path, links)

    files = [file for file in on_each_file(copy_one, list(found.copied)) if file is not None]
    _link(found, target)
    return files


def _copy_one(source: str, target: str, path: str, links: Links) -> CodeFile | None:
    """Copy a file; None if it vanished."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP and (link := _read_link(source)) is not None:
            text = links.target(path, link)
            Path(target).symlink_to(text)
            return link_to(text, path)
        if error.errno in GONE or error.errno == errno.ENXIO:
            return None
        raise _unreadable(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        for left in reversed(range(TRIES)):
            before = os.fstat(descriptor)
            file = _copy_content(descriptor, target, path, before)
            after = os.fstat(descriptor)
            if not left or (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size):
                return file
            Path(target).unlink()
        return None
    finally:
        os.close(descriptor)


def _copy_content(descriptor: int, target: str, path: str, state: os.stat_result) -> CodeFile:
    mode = mode_of(state)
    size, digest = 0, xxhash.xxh3_128()
    # users who can't read the original must not be able to read the copy
    allowed = state.st_mode & (0o555 if mode == EXECUTABLE else 0o444) | stat.S_IRUSR
    with errors_naming(Path(target)):
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, allowed)
        try:
            while block := _read(descriptor, size, path):
                size += len(block)
                digest.update(block)
                _write(copy, block)
        finally:
            os.close(copy)
    return CodeFile(path, mode, size, digest.hexdigest())


def _read(descriptor: int, offset: int, path: str) -> bytes:
    try:
        return os.pread(descriptor, BLOCK_BYTES, offset)
    except OSError as error:
        raise _unreadable(path, error) from error


def _write(descriptor: int, block: bytes) -> None:
    written = 0
    while written < len(block):
        written += os.write(descriptor, block[written:])


def _unreadable(path: str, error: OSError) -> CodeFilesError:
    problem = f"{path} can't be read ({error.strerror})"
    return CodeFilesError(problem, f"correct its permissions, or leave it out with code.exclude=[{path}]")


def _read_link(source: str) -> str | None:
    try:
        return os.readlink(source)  # noqa: PTH115 - Path.readlink would change its text
    except OSError:
        return None


def _make_folders(found: CodeFiles, target: Path) -> None:
    """Make the folders that don't contain files, unless the copy has something in their place."""
    for path in sorted(found.folders):
        place = target / path
        # not in a folder that the program moved elsewhere, and replaced by a link
        if not os.path.lexists(place) and place.parent.resolve().is_relative_to(target.resolve()):
            with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
                place.mkdir()


def _link(found: CodeFiles, target: Path) -> None:
    """Link to what the code may use and that isn't copied, unless the copy has something in its place."""
    for path in found.linked:
        place = target / path
        # not below another link: it would be made in the original
        if not (found.root / path).exists() or place.parent.is_symlink():
            continue
        with contextlib.suppress(FileExistsError):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(found.root / path)
