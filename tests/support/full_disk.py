"""A disk that is full: imitated by a limit on the size of files, or a small one in memory."""

import contextlib
import os
import resource
import subprocess

import pytest


@contextlib.contextmanager
def full_disk(limit_bytes):
    """Every file of this process ends at ``limit_bytes``: writes beyond fail, those across it are cut short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(folder, options):
    """A file system in memory, mounted on a folder; its options are those of tmpfs, such as `size=1m,nr_inodes=20`."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no mounting here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def use_up_files(folder):
    """Create files until the file system has no more."""
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (folder / f"filler_{number}").touch()
