"""Taking checkpoints away, so that a crash in the middle leaves no half of one in sight."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from hpctrain.errors import CheckpointDamagedError
from hpctrain.files import TEMPORARY_PREFIX, fsync_directory, temporary_name
from hpctrain.run.checkpoints import MANIFEST, read_manifest
from hpctrain.run.directory import RunDirectory

log = logging.getLogger("hpctrain.checkpoint")

_REMOVED, _REPLACED = "removed-", "replaced-"
_LEFTOVER = re.compile(
    rf"{re.escape(TEMPORARY_PREFIX)}(?P<kind>{_REMOVED}|{_REPLACED})?(?P<name>step_\d{{8,}})-[0-9a-f]{{8}}"
)


def is_ours(path: Path) -> bool:
    """Whether the directory at ``path`` holds a checkpoint that hpctrain wrote, and nothing that somebody added."""
    if path.is_symlink():
        return False
    try:
        known = {MANIFEST, *read_manifest(path)["files"]}
    except CheckpointDamagedError:
        return False
    return all(entry.name in known or entry.name.startswith(".nfs") for entry in path.iterdir())


def remove_checkpoint(path: Path) -> bool:
    """Remove a checkpoint that hpctrain wrote; it goes out of sight in one rename.

    Returns:
        Whether it was removed: one that somebody put a file into stays.

    Raises:
        OSError: what the file system said; `remove_leftovers` takes up the rest at the next start.
    """
    if not is_ours(path):
        log.warning("%s is kept: it holds something that hpctrain did not write", path)
        return False
    _take_away(path, path.name)
    return True


def move_aside(path: Path) -> Path:
    """Make way for a new checkpoint of the same step; `discard_replaced` or `remove_leftovers` end it."""
    aside = temporary_name(path.with_name(_REPLACED + path.name))
    path.rename(aside)
    return aside


def discard_replaced(aside: Path) -> None:
    """Remove what `move_aside` gave; what hpctrain did not write is kept beside the checkpoints, and named.

    Raises:
        OSError: what the file system said.
    """
    if is_ours(aside):
        name = _LEFTOVER.fullmatch(aside.name)
        assert name is not None
        _take_away(aside, name["name"])
        return
    kept = aside.with_name(aside.name.removeprefix(TEMPORARY_PREFIX))
    aside.rename(kept)
    log.warning("%s was in the way of a new checkpoint, and holds what hpctrain did not write: now %s", aside, kept)


def remove_leftovers(directory: RunDirectory) -> list[str]:
    """End what dead attempts left half done under temporary names; called by rank zero when an attempt starts.

    A checkpoint that was making way for a new one which never came is put back. What can't be removed is logged and
    left. Names that hpctrain doesn't give are not touched.

    Returns:
        The names that were dealt with.
    """
    if not directory.checkpoints.is_dir():
        return []
    done = []
    for path in sorted(directory.checkpoints.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        final = path.with_name(match["name"])
        try:
            if match["kind"] != _REPLACED:
                shutil.rmtree(path)
            elif final.exists():
                discard_replaced(path)
            else:
                path.rename(final)
        except OSError as error:
            log.warning("%s is left of an earlier attempt and can't be removed: %s", path, error.strerror)
            continue
        done.append(path.name)
    return done


def _take_away(path: Path, name: str) -> None:
    """Remove under a name that says so: what a crash leaves of it is no checkpoint to anybody any more."""
    condemned = temporary_name(path.with_name(_REMOVED + name))
    path.rename(condemned)
    fsync_directory(path.parent)
    shutil.rmtree(condemned)
