"""A file system for one test, which can be full or read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

SIZE_MB = 24
CHUNK = bytes(1 << 16)


class Disk:
    """A small file system in memory, which the sandboxes' nodes share with this machine.

    Args:
        path: where it is mounted, in a shared mount that was there before the sandboxes started.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        mount("-t", "tmpfs", "-o", f"size={SIZE_MB}m", "disk", str(path))
        # the nodes also see what is mounted in it later
        mount("--make-shared", str(path))

    def fill(self) -> None:
        """Take all the space that is left."""
        with (self.path / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(CHUNK):
                    pass
            except OSError:
                return

    def free(self) -> None:
        """Free that space."""
        (self.path / "filler").unlink()

    @contextmanager
    def read_only(self, paths: Sequence[Path], sandbox: SlurmSandbox) -> Iterator[None]:
        """Inside the context, no node can write to these folders or files.

        Only they become read-only: the kernel refuses that for a whole file system while files on it are open for
        writing. Files that were open before stay writable, as on a file system that an error has made read-only.
        """
        for path in paths:
            mount("--bind", str(path), str(path))
        self._remount("ro", paths, sandbox)
        yield
        self._remount("rw", paths, sandbox)

    def _remount(self, mode: str, paths: Sequence[Path], sandbox: SlurmSandbox) -> None:
        for path in paths:
            for node in sandbox.nodes:
                sandbox.on(node, "mount", "-n", "-o", f"remount,bind,{mode}", str(path))

    def remove(self) -> None:
        """Unmount the file system, with all that is in it."""
        unmount(self.path)


def unmount(path: Path) -> None:
    """Unmount a folder and what is mounted in it."""
    subprocess.run(["umount", "--recursive", "--lazy", str(path)], check=True)


def mount(*arguments: str) -> None:
    """Mount something on this machine."""
    subprocess.run(["mount", "-n", *arguments], check=True)
