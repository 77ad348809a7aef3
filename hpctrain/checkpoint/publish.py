"""Publish a checkpoint in one rename, so that it is complete or absent at any time, even if the process dies."""

from __future__ import annotations

import logging
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checksummed_file import ChecksummedFile
from hpctrain.checkpoint.retention import discard_replaced, move_aside
from hpctrain.checkpoint.room import after_full, is_full
from hpctrain.errors import CheckpointError
from hpctrain.files import fsync_directory, temporary_name
from hpctrain.run.checkpoint_manifest import ALGORITHM, MANIFEST, encode_manifest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import limit_met
from hpctrain.run.gone_checkpoints import record_saved
from hpctrain.run.ledger import Claim

log = logging.getLogger("hpctrain.checkpoint")


@contextmanager
def unpublished(directory: RunDirectory, claim: Claim, step: int) -> Iterator[Path]:
    """Make a temporary directory for the files of a checkpoint; publish it inside the context, or it is removed.

    Args:
        directory: of the run.
        claim: of this attempt.
        step: of the checkpoint.

    Raises:
        SupersededError: a later attempt owns the run; nothing was published.
        CheckpointError: a file can't be written; earlier checkpoints are unchanged.
    """
    final = directory.checkpoint(step)
    temporary = temporary_name(final)
    try:
        claim.require_ownership()
        _make_folder(directory)
        temporary.mkdir()
        yield temporary
        record_saved(directory.attempt(claim.attempt), step)
    except (OSError, CheckpointError) as error:
        # a later attempt removes this attempt's temporary directory: check for that before blaming the disk
        with suppress(OSError):
            claim.require_ownership()
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        advice = limit_met(error, directory.checkpoints) or "check that the file system is writable"
        if is_full(error):
            advice = after_full(directory, error, temporary)
        raise CheckpointError(
            f"the checkpoint of step {step} can't be written to {final}: {reason}; earlier checkpoints are unchanged; "
            f"{advice}"
        ) from error
    finally:
        # once it is published, nothing has this name any more
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, final: Path, claim: Claim) -> Path:
    """Give a complete checkpoint its name, and return its path; one of the same step is replaced.

    Args:
        temporary: its directory, durable with all files.
        final: its path.
        claim: of this attempt.

    Raises:
        SupersededError: a later attempt owns the run.
        OSError: the file system refuses.
    """
    claim.require_ownership()
    replaced = move_aside(final) if final.exists() else None
    try:
        temporary.rename(final)
    except BaseException:
        if replaced is not None:
            replaced.rename(final)
        raise
    fsync_directory(final.parent)
    if replaced is not None:
        try:
            discard_replaced(replaced)
        except OSError as error:
            log.warning("%s was replaced and can't be removed: %s", replaced, error.strerror)
    return final


def write_manifest(
    path: Path,
    state: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Any]],
    *,
    version: int,
    weights_digest: str,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Write the manifest of the checkpoint in the directory ``path``, and make both durable.

    Args:
        path: with all other files.
        state: with the fields of `Head`.
        files: size and checksum of each other file, by name.
        version: of the format.
        weights_digest: of the weights.
        mesh: the degrees of the mesh whose ranks wrote it, by name; None for a whole checkpoint.
    """
    manifest = {
        "format_version": version,
        "algorithm": ALGORITHM,
        **{name: state[name] for name in ("step", "samples_seen", "world_size", "config_digest")},
        **({} if mesh is None else {"mesh": dict(mesh)}),
        "weights_digest": weights_digest,
        "score": state["score"],
        "time": time.time(),
        "files": {name: files[name] for name in sorted(files)},
    }
    file = ChecksummedFile(path / MANIFEST)
    file.write(encode_manifest(manifest))
    file.close()
    fsync_directory(path)


def _make_folder(directory: RunDirectory) -> None:
    folder = directory.checkpoints
    try:
        folder.mkdir(stat.S_IMODE(directory.path.stat().st_mode))
    except FileExistsError:
        return
    log.warning("%s was removed, with its contents: created again", folder)
