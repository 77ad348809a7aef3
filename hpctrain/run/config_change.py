"""A resume's change to a run's configuration: kept once an attempt trains with it, otherwise reverted.

Until then, `config.before.yaml` holds the previous configuration.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpctrain.files import write_atomic
from hpctrain.run.directory import RunDirectory


def change_config(directory: RunDirectory, text: str) -> None:
    """Store a configuration, and keep the one before it until an attempt trains with it; the same one is no change.

    Raises:
        OSError: it can't be written; the stored one is unchanged.
    """
    # after a resume that was cancelled in the queue, the file is there already: keep it, the last one that worked
    if directory.config.exists() and not directory.config_before.exists():
        found, before = directory.config.stat(), directory.config.read_bytes()
        if before != text.encode():
            write_atomic(directory.config_before, before)
            # `status` sorts the runs by it
            os.utime(directory.config_before, ns=(found.st_atime_ns, found.st_mtime_ns))
    write_atomic(directory.config, text)


def trained_config(directory: RunDirectory) -> Path:
    """The file of the configuration with which the run last trained."""
    return directory.config_before if directory.config_before.exists() else directory.config


def keep_config(directory: RunDirectory) -> None:
    """Keep the change: an attempt trains with it."""
    # a read-only file system for a moment must not stop an attempt
    with contextlib.suppress(OSError):
        directory.config_before.unlink(missing_ok=True)


def revert_config(directory: RunDirectory) -> bool:
    """Revert the change; return whether there was one.

    Raises:
        OSError: the file system's error.
    """
    try:
        changed = directory.config_before.read_bytes() != directory.config.read_bytes()
        directory.config_before.replace(directory.config)
    except FileNotFoundError:
        return False
    return changed
