"""W&B, over the network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from hpctrain.run.process import temporary_folder
from hpctrain.sync.description import Description, ReportedState
from hpctrain.sync.rows import Row
from hpctrain.sync.service import OpenedRun, without_user
from hpctrain.sync.wandb_run import address_of, close_run, log_row, media_of, open_run, project_of


class WandbOnline:
    """A run at W&B. The run's steps are W&B's own, by which it reports how much it has."""

    confirms_at_close = True

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._run: Any = None
        self._next_step = 0

    def destination(self, run: Description) -> str:
        """Name the server, the entity and the project, as far as they are set; see `Service`."""
        server = without_user(os.environ.get("WANDB_BASE_URL", "")).rstrip("/")
        entity = run.key("wandb", "entity") or os.environ.get("WANDB_ENTITY")
        return "/".join(filter(None, (server, entity, project_of(run))))

    def open(self, run: Description, known_id: str) -> OpenedRun:  # noqa: ARG002 - the digest is the id at W&B
        """Resume the run at W&B, or begin it; see `Service`."""
        # wandb's own files: what matters of them is in the run directory already
        folder = self._stack.enter_context(temporary_folder("wandb"))
        try:
            self._run = open_run(run, folder=folder, mode="online")
        except BaseException:
            self._stack.close()
            raise
        # one after the last that W&B has, and 0 if it has none; `step` is 0 in any run that hasn't logged yet
        self._next_step = int(self._run.starting_step)
        return OpenedRun(run_id=run.digest, address=address_of(self._run), last_step=self._next_step - 1)

    def send(self, rows: Sequence[Row], *, in_doubt: bool) -> None:
        """Queue the rows that W&B doesn't have; see `Service`."""
        for row in rows:
            if row.step >= self._next_step:
                log_row(self._run, row)
                self._next_step = row.step + 1
            elif in_doubt:
                # a row arrives before the files to which it refers
                media_of(self._run, row)

    def close(self, reported: ReportedState) -> None:
        """Wait until W&B has everything; see `Service`."""
        close_run(self._run, reported)
        self._stack.close()

    def abandon(self) -> None:
        """Leave without waiting; see `Service`."""
        self._stack.close()
