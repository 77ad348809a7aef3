"""Roll back a failed launch: restore an existing run, and remove the folders made for a new one."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from hpctrain.files import write_atomic
from hpctrain.run.directory import RunDirectory


@contextlib.contextmanager
def run_restored_on_error(directory: RunDirectory) -> Iterator[None]:
    """On an error inside the context, restore an existing run's configuration and mode, and remove new files.

    Once a job is submitted, nothing is undone. A run that doesn't exist yet is left to `discard_unstarted`, and its
    parents to `new_folders_removed_on_error`.
    """
    if not directory.config.is_file():
        yield
        return
    config, found = directory.config.read_bytes(), directory.config.stat()
    mode = stat.S_IMODE(directory.path.stat().st_mode)
    # the folders that preparing and submitting write into
    folders = (directory.path, directory.logs, directory.logs / "submitit")
    before = {folder: _names(folder) for folder in folders}
    submissions = len(directory.job_records())
    try:
        yield
    except BaseException:
        if len(directory.job_records()) > submissions:
            raise
        # the caller needs the first error
        with contextlib.suppress(OSError):
            directory.path.chmod(mode)
        with contextlib.suppress(OSError), directory.permissions():
            if directory.config.stat().st_ino != found.st_ino:
                write_atomic(directory.config, config)
                # `status` sorts the runs by it
                os.utime(directory.config, ns=(found.st_atime_ns, found.st_mtime_ns))
            for folder, names in before.items():
                for name in _names(folder) - names:
                    _remove(folder / name)
        raise


@contextlib.contextmanager
def new_folders_removed_on_error(path: Path) -> Iterator[None]:
    """On an error inside the context, remove the empty folders created for ``path``, itself included."""
    whole = path.absolute()
    absent = [folder for folder in (whole, *whole.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in absent:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()  # noqa: PTH208 - names are what is compared


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
