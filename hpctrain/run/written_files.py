"""What a program wrote into the copy of its code, in which it runs; a later copy gets links to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate, islice
from pathlib import Path

from hpctrain.run.code import CodeSnapshot, read_files

CACHE = "__pycache__"
MAX_ENTRIES = 1000
"""Entries of a linked folder whose modification times are read."""


def written_files(code: CodeSnapshot) -> list[str]:
    """Return files and folders of a copy that aren't in its list, relative to it; of a new folder no contents.

    Raises:
        OSError: the copy or its list can't be read.
        RunDirectoryError: the list isn't one.
    """
    files = {file.path for file in read_files(code.list)}
    folders = {above for path in (*files, f"{code.place}/.") for above in _folders_above(path)}
    return sorted(_Walk(code, files, folders).below(""))


def written_originals(code: CodeSnapshot, since: float) -> list[str]:
    """Return the links of a copy whose targets were modified since a time, relative to the copy.

    In a linked folder, only the folder and its first `MAX_ENTRIES` are looked at: data may have millions of files.

    Args:
        code: the copy.
        since: epoch seconds.

    Raises:
        OSError: the copy can't be read.
    """
    outputs = {code.folder / path for path in written_files(code)}
    links: list[Path] = []
    for above, folders, files in os.walk(code.folder):
        paths = [Path(above, name) for name in (*folders, *files)]
        links += [path for path in paths if path.is_symlink() and _leads_to_original(code, path)]
        folders[:] = [name for name in folders if Path(above, name) not in outputs]
    return sorted(link.relative_to(code.folder).as_posix() for link in links if _newest_time(link) > since)


def _newest_time(path: Path) -> float:
    try:
        time = path.stat().st_mtime
        if not path.is_dir():
            return time
        with os.scandir(path) as entries:
            return max(time, *(entry.stat().st_mtime for entry in islice(entries, MAX_ENTRIES)), 0.0)
    except OSError:
        return 0.0


def _folders_above(path: str) -> Iterator[str]:
    return accumulate(path.split("/")[:-1], "{}/{}".format)


class _Walk:
    """Finds what is in a copy beyond its list.

    Args:
        code: the copy.
        files: of its list.
        folders: that contain them.
    """

    def __init__(self, code: CodeSnapshot, files: set[str], folders: set[str]) -> None:
        self._code = code
        self._files = files
        self._folders = folders

    def below(self, prefix: str) -> Iterator[str]:
        with os.scandir(self._code.folder / prefix) as entries:
            for entry in entries:
                path = prefix + entry.name
                if path not in self._files and entry.name != CACHE and not entry.name.endswith(".pyc"):
                    yield from self._at(path, entry)

    def _at(self, path: str, entry: os.DirEntry[str]) -> Iterator[str]:
        if not entry.is_dir(follow_symlinks=False):
            if not (entry.is_symlink() and _leads_to_original(self._code, Path(entry.path))):
                yield path
        elif path in self._folders:
            yield from self.below(f"{path}/")
        elif any(self.below(f"{path}/")):  # a folder may have been made for links to the original
            yield path


def _leads_to_original(code: CodeSnapshot, link: Path) -> bool:
    """Whether a link leads to what wasn't copied: the next copy has one of its own."""
    target = link.readlink()
    return target.is_absolute() and target.is_relative_to(code.root)


def carry_over(old: CodeSnapshot, new: CodeSnapshot) -> list[str]:
    """Make links in a copy to what a program wrote into the one before; return what has the same name in the new code.

    Raises:
        OSError: one of the copies can't be read or written.
        RunDirectoryError: the old copy's list isn't one.
    """
    return [left for path in written_files(old) for left in _carry(old, new, path)]


def _carry(old: CodeSnapshot, new: CodeSnapshot, path: str) -> Iterator[str]:
    source, place = old.folder / path, new.folder / path
    if not source.exists():
        return
    if _is_folder(source) and _is_folder(place):
        for inside in sorted(source.iterdir()):
            if inside.name != CACHE and not (inside.is_symlink() and _leads_to_original(old, inside)):
                yield from _carry(old, new, f"{path}/{inside.name}")
    elif os.path.lexists(place):
        if place.resolve() != source.resolve():
            yield path
    elif _is_inside(place, new.folder):
        place.parent.mkdir(parents=True, exist_ok=True)
        target = _target(source, old.folder)
        # relative to where it really is: the run may be moved
        text = os.path.relpath(target.parent.resolve() / target.name, place.parent.resolve())
        place.symlink_to(text)
    else:
        yield path


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_inside(place: Path, folder: Path) -> bool:
    """Whether a path that doesn't exist would be made in a folder itself, and not behind a link or below a file."""
    above = next(each for each in place.parents if os.path.lexists(each))
    return above.is_dir() and above.resolve().is_relative_to(folder.resolve())


def _target(source: Path, folder: Path) -> Path:
    """Return what to link to: not a link that an earlier change of the code made, since long chains fail."""
    if not source.is_symlink():
        return source
    target = Path(os.path.normpath(source.parent / source.readlink()))
    return source if target.is_relative_to(folder) else target
