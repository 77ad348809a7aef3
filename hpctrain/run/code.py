"""The code with which a run is made: a copy that was taken when it was launched, and records of each use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from hpctrain.errors import RunDirectoryError
from hpctrain.files import append_json_line, on_each_file, read_json, read_json_lines, temporary_name, write_atomic
from hpctrain.phrases import listed
from hpctrain.run.directory import RunDirectory
from hpctrain.run.record_fields import COUNT, PATH, TEXT, TEXTS, TIME, require_fields
from hpctrain.streams import Printer, print_warning

FILE, EXECUTABLE, LINK = "100644", "100755", "120000"
"""Modes of files, as git has them."""
CACHE = "__pycache__"
MISSING = "was removed"
"""The problem with a file of the copy that isn't there."""

_RECORD = {
    **dict.fromkeys(("digest", "commit"), TEXT),
    **dict.fromkeys(("folder", "root", "working_directory"), PATH),
    **dict.fromkeys(("files", "bytes"), COUNT),
    "own_paths": TEXTS,
    "time": TIME,
}
_FILE = {"path": PATH, "mode": TEXT, "size": COUNT, "checksum": TEXT}


@dataclass(frozen=True, slots=True)
class CodeFile:
    """A file of a copy.

    Attributes:
        path: relative to the copy's folder.
        mode: `FILE`, `EXECUTABLE` or `LINK`.
        size: bytes; of a symbolic link, of its target's path.
        checksum: XXH3 (128 bits) of the same, in hexadecimal.
    """

    path: str
    mode: str
    size: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSnapshot:
    """A copy of the code, with which ranks of a run import their modules.

    Attributes:
        run: that uses it.
        digest: of the files; equal code has the same.
        folder: that contains the files.
        root: of the original: a git repository, or the working directory.
        place: of the working directory in both; `.` for the root.
        commit: of git, when it was taken; empty if that isn't known.
        files: their number.
        bytes: in them.
        own_paths: of a program with `run.cwd=own`: the folders that are empty in own copies, such as
            `outputs`, and the files that these lack, relative to the root; None for a program in the shared copy.
    """

    run: RunDirectory
    digest: str
    folder: Path
    root: Path
    place: str
    commit: str = field(default="", compare=False)
    files: int = field(default=0, compare=False)
    bytes: int = field(default=0, compare=False)
    own_paths: tuple[str, ...] | None = None

    @property
    def working_directory(self) -> Path:
        """The folder that stands for the working directory."""
        return self.folder / self.place

    @property
    def as_own_copy(self) -> CodeSnapshot:
        """The run's own copy of the same code, which may not exist yet; see `make_own_copy`."""
        return replace(self, folder=self.run.code / self.digest)

    @property
    def submit_dir(self) -> Path:
        """The working directory in which the run was launched, or resumed with today's code."""
        return self.root / self.place

    @property
    def list(self) -> Path:
        """The list of its files."""
        return list_of(self.folder)

    @property
    def description(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        folder = os.path.relpath(self.folder, self.run.path)
        return {"digest": self.digest, "folder": folder, "files": self.files, "bytes": self.bytes}

    def damaged_files(self, files: Sequence[CodeFile], *, contents: bool = True) -> Sequence[tuple[str, str]]:
        """Compare the files with a list; return the paths of those that differ, each with its problem.

        Args:
            files: as they should be.
            contents: also read the files.

        Raises:
            OSError: the file system is unavailable.
        """
        return list(filter(None, on_each_file(lambda file: self._describe_damage(file, contents), files)))

    def find_damage(self, *, contents: bool = True) -> str:
        """Compare the files with the list; return a line on those that are missing or on a changed one, or nothing.

        Args:
            contents: also read the files.

        Raises:
            OSError: the file system is unavailable.
        """
        problem = self._describe(contents=contents)
        today = f"take today's code with `python -m hpctrain resume {self.run.as_typed} --code=now`"
        return f"{problem}, or {today}" if problem else ""

    def _describe(self, *, contents: bool) -> str:
        if not self.folder.is_dir():
            restore = "restore it"
            if self.folder.parent != self.run.code:
                restore = f"if the run was moved out of its sweep, copy the sweep's folder code into {self.run.path}"
            return f"{self.folder}, the code of this run, is missing: {restore}"
        try:
            files = read_files(self.list)
        except (FileNotFoundError, RunDirectoryError) as error:
            return f"{self.list}, the list of the run's code, can't be read ({error}): restore it"
        if digest_of(files) != self.digest:
            return f"{self.list}, the list of the run's code, was changed since the code was taken: restore it"
        damage = self.damaged_files(files, contents=contents)
        missing = [(path, problem) for path, problem in damage if problem == MISSING]
        if len(missing) > 1:
            which = f"{len(missing)} of {len(files)} files were removed since the code was taken"
            return f"{self.folder}: {which} ({listed([path for path, _ in missing])}): restore them"
        for path, problem in missing or damage:
            return f"{self.folder / path} {problem} since the code was taken: restore it"
        return ""

    def _describe_damage(self, file: CodeFile, contents: bool) -> tuple[str, str] | None:
        path = self.folder / file.path
        try:
            is_intact = describe_file(path, file.path) == file if contents else bool(path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return file.path, MISSING
        except PermissionError:
            return file.path, "was closed to this user"
        return None if is_intact else (file.path, "was changed")

    def leads_to_original(self, path: Path) -> bool:
        """Whether a file of the copy is a link to what wasn't copied: the next copy has one of its own."""
        target = path.readlink() if path.is_symlink() else Path()
        return target.is_absolute() and target.is_relative_to(self.root)


def list_of(folder: Path) -> Path:
    """The path of the list of files that belongs to a copy."""
    return folder.with_name(f"{folder.name}.json")


def describe_file(path: Path, name: str) -> CodeFile:
    """Describe a file as it is on the disk.

    Args:
        path: of the file.
        name: for its description.

    Raises:
        OSError: it can't be read.
    """
    state = path.lstat()
    if stat.S_ISLNK(state.st_mode):
        text = os.fsencode(os.readlink(path))  # noqa: PTH115 - Path.readlink would change its text
        return CodeFile(name, LINK, len(text), xxhash.xxh3_128_hexdigest(text))
    if not stat.S_ISREG(state.st_mode):
        return CodeFile(name, f"{stat.S_IFMT(state.st_mode):o}", 0, "")
    with path.open("rb", buffering=0) as file:
        digest, size = hashlib.file_digest(file, xxhash.xxh3_128), file.tell()
    return CodeFile(name, EXECUTABLE if state.st_mode & stat.S_IXUSR else FILE, size, digest.hexdigest())


def digest_of(files: Sequence[CodeFile]) -> str:
    """Return the digest of a copy, which depends on names, contents and modes alone."""
    digest = xxhash.xxh3_128()
    for file in sorted(files, key=lambda file: os.fsencode(file.path)):
        digest.update(b"\0".join((os.fsencode(file.path), file.mode.encode(), file.checksum.encode(), b"")))
    return digest.hexdigest()


def write_files(path: Path, files: Sequence[CodeFile]) -> None:
    """Write the list of a copy's files; names that aren't UTF-8 have their other bytes as lone surrogates."""
    # a line per file; indented, each field would have one
    lines = ",\n".join(json.dumps({name: getattr(file, name) for name in _FILE}) for file in files)
    write_atomic(path, f'{{"files": [\n{lines}\n]}}\n', durable=False)


def read_files(path: Path) -> Sequence[CodeFile]:
    """Read the list of a copy's files.

    Raises:
        OSError: it can't be read.
        RunDirectoryError: it isn't such a list.
    """
    records = read_json(path).get("files")
    if not isinstance(records, list):
        raise RunDirectoryError(f"{path}: expected a list of files")
    for record in records:
        require_fields(path, record if isinstance(record, dict) else {}, _FILE, required=tuple(_FILE))
    return [CodeFile(**{name: record[name] for name in _FILE}) for record in records]


def record_code(directory: RunDirectory, code: CodeSnapshot | None, when: float) -> None:
    """Record the code with which a run is made from now on.

    Args:
        directory: of the run.
        code: None if its ranks are to import from their working directory.
        when: epoch seconds.
    """
    record: dict[str, Any] = {"digest": None}
    if code is not None:
        record = replace(code, run=directory).description
        record |= {"root": str(code.root), "working_directory": code.place, "commit": code.commit or None}
        if code.own_paths is not None:
            record["own_paths"] = list(code.own_paths)
    with directory.permissions():
        append_json_line(directory.code_records, {**record, "time": when}, durable=True)


def code_records(directory: RunDirectory) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's code, oldest first.

    Raises:
        RunDirectoryError: a field of a record can't be.
    """
    for record in read_json_lines(directory.code_records):
        required = tuple(_RECORD.keys() - {"commit", "own_paths"}) if record.get("digest") else ()
        require_fields(directory.code_records, record, _RECORD, required)
        yield record


def current_code(directory: RunDirectory, digest: str | None = None) -> CodeSnapshot | None:
    """Return the copy with which a run is made; None if its ranks import from their working directory.

    Args:
        directory: of the run.
        digest: of the copy that its launcher found, if another one may have been recorded since.

    Raises:
        RunDirectoryError: a field of a record can't be.
    """
    records = [record for record in code_records(directory) if digest in (None, record.get("digest"))]
    if not records or records[-1].get("digest") is None:
        return None
    record, digest = records[-1], str(records[-1]["digest"])
    folder = Path(os.path.normpath(directory.path / record["folder"]))
    # a program of a sweep has its own copy once it has begun; so may a run that was moved out of its sweep
    own_copy = directory.code / digest
    return CodeSnapshot(
        run=directory,
        digest=digest,
        folder=own_copy if own_copy.is_dir() else folder,
        root=Path(record["root"]),
        place=record["working_directory"],
        commit=record.get("commit") or "",
        files=record["files"],
        bytes=record["bytes"],
        own_paths=tuple(record["own_paths"]) if "own_paths" in record else None,
    )


def code_for_attempt(directory: RunDirectory) -> tuple[CodeSnapshot | None, str]:
    """Check the code of an attempt that is about to start, and make the run's own copy if it needs one.

    Only the launcher of the attempt calls this, before the ranks start on any node. The run's own copy is made here and
    not at the submission, so that submitting a sweep of a thousand runs makes one copy.

    Returns:
        The copy from which its ranks import, None for their working directory; and what is wrong with it, in one line
        that is empty if nothing is.

    Raises:
        OSError: the file system is unavailable, or full.
        RunDirectoryError: a field of a record can't be.
    """
    code = current_code(directory)
    damage = "" if code is None else code.find_damage()
    if code is not None and not damage and code.own_paths is not None and code != code.as_own_copy:
        code = make_own_copy(code)
    return code, damage


def make_own_copy(code: CodeSnapshot, warn: Printer = print_warning) -> CodeSnapshot:
    """Make the copy in which a program of a sweep runs, or repair one that was made before.

    It consists of hard links to the copy that the sweep's runs share: they take no space and no inodes. Its `__file__`
    is in the run directory, so a program that writes beside its source files writes into its own run.

    Args:
        code: the copy that the runs of the sweep share.
        warn: gets a line on files of an earlier own copy that were damaged.

    Raises:
        OSError: it can't be written.
        RunDirectoryError: the list of the copy isn't one.
    """
    with code.run.permissions():
        code.run.close_folder(code.run.code, 0o777)
        return publish(code, lambda folder: _link_all(code, folder), warn)


def _link_all(code: CodeSnapshot, target: Path) -> Sequence[CodeFile]:
    """Make the folders of a copy in another one, with hard links to its files; return its list.

    Runs that began with `run.cwd=shared` may have written into the copy, which may also link to folders that are the
    run's own here.
    """
    own_paths = [path for path in code.own_paths or () if (code.folder / path).is_symlink()]
    left_out = {code.folder / path for path in (*written_files(code), *own_paths)}
    files = []
    for above, folders, names in os.walk(code.folder):
        place = target / Path(above).relative_to(code.folder)
        place.mkdir(exist_ok=True)
        names += [name for name in folders if Path(above, name).is_symlink()]
        folders[:] = [name for name in folders if Path(above, name) not in left_out]
        files += [(Path(above, name), place / name) for name in names if Path(above, name) not in left_out]
    on_each_file(lambda pair: _link(*pair), files)
    for path in code.own_paths or ():
        if (code.folder / path).is_dir():
            (target / path).mkdir(parents=True, exist_ok=True)
    return read_files(code.list)


def written_files(code: CodeSnapshot) -> list[str]:
    """Return files and folders of a copy that aren't in its list, relative to it; of a new folder no contents.

    Raises:
        OSError: the copy or its list can't be read.
        RunDirectoryError: the list isn't one.
    """
    files = {Path(file.path) for file in read_files(code.list)}
    folders = {above for path in (*files, Path(code.place, "file")) for above in path.parents}

    def written_below(folder: Path) -> Iterator[Path]:
        with os.scandir(code.folder / folder) as entries:
            for entry in entries:
                path = folder / entry.name
                if path in files or entry.name == CACHE or path.suffix == ".pyc":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    # a new folder may have been made for links to the original
                    inside = written_below(path)
                    yield from inside if path in folders else ([path] if any(inside) else [])
                elif not code.leads_to_original(Path(entry.path)):
                    yield path

    return sorted(path.as_posix() for path in written_below(Path()))


def publish(code: CodeSnapshot, fill: Callable[[Path], Sequence[CodeFile]], warn: Printer) -> CodeSnapshot:
    """Make a copy under a temporary name and rename it, or repair the one of equal files that is there.

    Args:
        code: the copy; its digest, folder and counts are those of the files. The run's folder of copies exists.
        fill: makes the files in a folder, and returns their list.
        warn: gets a line on files that were damaged.

    Raises:
        OSError: it can't be written.
    """
    temporary = temporary_name(code.run.code / "copy")
    temporary.mkdir()
    try:
        files = fill(temporary)
        code = replace(code, digest=digest_of(files), files=len(files), bytes=sum(file.size for file in files))
        code = code.as_own_copy
        write_files(code.list, files)
        try:
            temporary.rename(code.folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if damaged := _repair(code, files, temporary):
                remedy = "today's files take their place, and what was there is named NAME.damaged-..."
                warn(f"{code.folder} was changed since it was taken ({listed(damaged)}): {remedy}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # nothing of it is left after the renaming
    return code


def _repair(code: CodeSnapshot, files: Sequence[CodeFile], source: Path) -> list[str]:
    """Replace the damaged files of a copy, and return their paths; what is there stays, as `NAME.damaged-XXXXXXXX`.

    A program may have overwritten a tracked file with its results.
    """
    damaged: list[str] = []
    # where a link was in the place of a folder, more files are missing afterwards
    while paths := [path for path, _ in code.damaged_files(files) if path not in damaged]:
        for path in paths:
            place = code.folder / path
            ancestors = [code.folder / folder for folder in [*reversed(Path(path).parents)][1:]]
            # not behind a link that a program put in the place of a folder: it leads out of the run
            obstacle = next((ancestor for ancestor in ancestors if ancestor.is_symlink() or ancestor.is_file()), place)
            if os.path.lexists(obstacle):
                obstacle.rename(obstacle.with_name(f"{obstacle.name}.damaged-{secrets.token_hex(4)}"))
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(source / path, place)
        damaged += paths
    return damaged


def _link(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(os.readlink(source))  # noqa: PTH115 - Path.readlink would change its text
        return
    if not os.access(source, os.W_OK):  # root may write, and would change the files of the other runs
        with contextlib.suppress(OSError):  # between folders of BeeGFS and AFS, or of another member of the group
            target.hardlink_to(source)
            return
    shutil.copyfile(source, target)
    target.chmod(source.stat().st_mode & 0o777)
