"""Files that a program wrote into the copy of its code, in which it runs; a later copy gets links to them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from hpctrain.run.code import CACHE, CodeSnapshot, written_files

MAX_ENTRIES = 1000
"""Entries of a linked folder whose modification times are read."""


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
        links += [path for name in (*folders, *files) if code.leads_to_original(path := Path(above, name))]
        folders[:] = [name for name in folders if Path(above, name) not in outputs]
    return sorted(link.relative_to(code.folder).as_posix() for link in links if _newest_time(link) > since)


def _newest_time(path: Path) -> float:
    times = [0.0]
    with contextlib.suppress(OSError):  # not a folder, or removed meanwhile
        times.append(path.stat().st_mtime)
        with os.scandir(path) as entries:
            times += [entry.stat().st_mtime for entry in islice(entries, MAX_ENTRIES)]
    return max(times)


def carry_over(old: CodeSnapshot, new: CodeSnapshot) -> list[str]:
    """Make links in a copy to what a program wrote into the one before; return what has the same name in the new code.

    Raises:
        OSError: one of the copies can't be read or written.
        RunDirectoryError: the old copy's list isn't one.
    """
    return [conflict for path in written_files(old) for conflict in _carry(old, new, path)]


def _carry(old: CodeSnapshot, new: CodeSnapshot, path: str) -> Iterator[str]:
    source, place = old.folder / path, new.folder / path
    if not source.exists():
        return
    if source.is_dir() and place.is_dir() and not (source.is_symlink() or place.is_symlink()):
        for inside in sorted(source.iterdir()):
            if inside.name != CACHE and not old.leads_to_original(inside):
                yield from _carry(old, new, f"{path}/{inside.name}")
        return
    nearest = next(ancestor for ancestor in place.parents if os.path.lexists(ancestor))
    is_free = nearest.is_dir() and nearest.resolve().is_relative_to(new.folder.resolve())
    if not os.path.lexists(place) and is_free:
        place.parent.mkdir(parents=True, exist_ok=True)
        # to the file itself, since long chains fail; relative to where it really is, since the run may be moved
        place.symlink_to(os.path.relpath(source.resolve(), place.parent.resolve()))
    elif place.resolve() != source.resolve():
        yield path
