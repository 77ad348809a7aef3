"""W&B's offline files in the run directory, for `wandb sync`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.files import TEMPORARY_PREFIX, fsync_directory, temporary_name
from hpctrain.run.directory import RunDirectory
from hpctrain.sync.cursor import NOTHING
from hpctrain.sync.description import Description, ReportedState
from hpctrain.sync.rows import Row
from hpctrain.sync.service import OpenedRun
from hpctrain.sync.wandb_run import close_run, log_row, open_run


class WandbOffline:
    """One folder ``offline-run-...`` with the whole run, which each sender makes anew.

    `wandb sync` uploads a folder as a whole: folders that continue each other would double or replace points.

    Args:
        directory: of the run.
    """

    confirms_at_close = True

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._home = directory.sync / "wandb"
        self._folder: Path | None = None
        self._run: Any = None

    def destination(self, run: Description) -> str:  # noqa: ARG002 - the same for every run
        """Name the folder of the files; see `Service`."""
        return "sync/wandb"

    def open(self, run: Description, known_id: str) -> OpenedRun:  # noqa: ARG002 - the digest is the id at W&B
        """Begin a folder; see `Service`."""
        self._home.mkdir(parents=True, exist_ok=True)
        for leftover in self._home.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._folder = temporary_name(self._home / "offline")
        self._folder.mkdir()
        self._run = open_run(run, folder=self._folder, mode="offline")
        return OpenedRun(run_id=run.digest, address="", last_step=NOTHING)

    def send(self, rows: Sequence[Row], *, in_doubt: bool) -> None:  # noqa: ARG002 - the folder is new
        """Write the rows; see `Service`."""
        for row in rows:
            log_row(self._run, row)

    def close(self, reported: ReportedState) -> None:
        """Complete the folder, and put it in the place of the earlier one; see `Service`."""
        close_run(self._run, reported)
        assert self._folder is not None
        (made,) = (self._folder / "wandb").glob("offline-run-*")
        before = [path for path in self._home.glob("offline-run-*") if path.name != made.name]
        shutil.rmtree(self._home / made.name, ignore_errors=True)  # made in the same second
        made.replace(self._home / made.name)
        fsync_directory(self._home)
        for path in before:
            shutil.rmtree(path, ignore_errors=True)
        self.abandon()

    def abandon(self) -> None:
        """Remove what is incomplete; see `Service`."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
