"""Weights & Biases: a run over the network, or as offline files in the run directory for `wandb sync`."""

from __future__ import annotations

import contextlib
import html
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from hpctrain.files import TEMPORARY_PREFIX, describe_os_error, fsync_directory, temporary_name
from hpctrain.run.directory import RunDirectory
from hpctrain.run.temporary_folder import temporary_folder
from hpctrain.sync.sent_run import Description, ReportedState, Row
from hpctrain.sync.service import NOTHING, OpenedRun, Service, client_errors, one_line, without_user

INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 600.0
"""Seconds for what is still to be uploaded; rank zero ends its sender process earlier."""
MAX_TABLE_ROWS = 10_000
"""wandb's own bound."""
PREEMPTED = 1
"""Any exit code but 0: after `mark_preempting`, W&B then shows the run as preempted, and not as failed."""


def connect(directory: RunDirectory, *, offline: bool, server: str | None) -> Service:  # noqa: ARG001 - wandb's is WANDB_BASE_URL
    """Make the client of a run; see `service.make_service`."""
    return WandbOffline(directory) if offline else WandbOnline()


class _WandbRun:
    """A run of wandb's client; its id is the run's digest."""

    confirms_at_close = True

    def __init__(self) -> None:
        self._run: Any = None

    def close(self, reported: ReportedState) -> None:
        """Report the run's end, and wait until W&B has everything; see `Service`."""
        with client_errors():
            self._run.summary.update(dict(reported.summary))
            if reported.state not in ("completed", "failed"):
                self._run.mark_preempting()
            self._run.finish(exit_code=0 if reported.state == "completed" else PREEMPTED)

    def _open(self, run: Description, folder: Path, mode: Literal["online", "offline"]) -> None:
        """Begin or resume the run; ``folder`` is where wandb writes its files."""
        # neither errors nor usage of this process are reported to W&B's developers
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",  # the output of this process isn't the run's
            disable_git=True,  # of the working directory: the launcher recorded the run's commit
            git_commit=run.origin.get("git_commit"),
            disable_code=True,
            save_code=False,
            symlink=False,
            # this process may run on another machine, and has nothing to do with the training's load
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            stop_fn=lambda: None,  # its default interrupts this process if someone stops the run in W&B's pages
        )
        # a folder `wandb` in the working directory may name another server, which would get the key
        with client_errors(), contextlib.chdir(folder):
            self._run = wandb.init(
                entity=run.key("wandb", "entity"),
                project=_project_of(run),
                id=run.digest,
                name=run.name,
                group=run.key("wandb", "group") or run.group or None,
                tags=run.key("wandb", "tags") or None,
                config={**run.config, "hpctrain": dict(run.origin)},
                resume="allow",
                mode=mode,
                dir=str(folder),
                settings=settings,
            )

    def _log(self, row: Row) -> None:
        """Log a row, whose step exceeds all earlier ones, at its step."""
        values: dict[str, Any] = {**row.values, **self._media(row)}
        if row.time:
            values["_timestamp"] = row.time
        with client_errors():
            self._run.log(values, step=row.step)

    def _media(self, row: Row) -> dict[str, Any]:
        """Have the files of a row's media uploaded, and return what refers to them, by name.

        The name of a file at W&B depends on the row and the content alone, so that a file can be uploaded again.
        """
        media = {}
        for medium in row.media.values():
            try:
                with medium.copied() as path:
                    converted = _converted(medium.kind, path)
                    if hasattr(converted, "bind_to_run"):
                        # here and not in `log`, whose names contain the number of the call, and which makes an artifact
                        # of each table; it copies the file
                        converted.bind_to_run(self._run, medium.name, row.step)
                if converted is not None:
                    media[medium.name] = converted
            except Exception as error:  # a file that a resume or its user has removed, or that wandb doesn't take
                why = describe_os_error(error) if isinstance(error, OSError) else one_line(error)
                print(f"{medium.name} of step {row.step} is left out: {why}", flush=True)
        return media


class WandbOnline(_WandbRun):
    """A run at W&B. The run's steps are W&B's own, by which it reports how much it has.

    If the steps were a metric, and W&B's own counted calls, W&B couldn't tell which rows it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        self._next_step = 0

    def destination(self, run: Description) -> str:
        """Name the server, the entity and the project, as far as they are set; see `Service`."""
        server = without_user(os.environ.get("WANDB_BASE_URL", "")).rstrip("/")
        entity = run.key("wandb", "entity") or os.environ.get("WANDB_ENTITY")
        return "/".join(filter(None, (server, entity, _project_of(run))))

    def open(self, run: Description, known_id: str) -> OpenedRun:  # noqa: ARG002 - the digest is the id at W&B
        """Resume the run at W&B, or begin it; see `Service`."""
        # wandb's own files: what matters of them is in the run directory already
        folder = self._stack.enter_context(temporary_folder("wandb"))
        try:
            self._open(run, folder, "online")
        except BaseException:
            self.abandon()
            raise
        # one after the last that W&B has, and 0 if it has none; `step` is 0 in any run that hasn't logged yet
        self._next_step = int(self._run.starting_step)
        return OpenedRun(run_id=run.digest, address=str(self._run.url or ""), last_step=self._next_step - 1)

    def send(self, rows: Sequence[Row], *, in_doubt: bool) -> None:
        """Queue the rows that W&B doesn't have; see `Service`."""
        for row in rows:
            if row.step >= self._next_step:
                self._log(row)
                self._next_step = row.step + 1
            elif in_doubt:
                # a row arrives before the files to which it refers
                self._media(row)

    def close(self, reported: ReportedState) -> None:
        """Wait until W&B has everything; see `Service`."""
        super().close(reported)
        self.abandon()

    def abandon(self) -> None:
        """Leave without waiting; see `Service`."""
        self._stack.close()


class WandbOffline(_WandbRun):
    """One folder ``offline-run-...`` with the whole run, which each sender makes anew.

    `wandb sync` uploads a folder as a whole: folders that continue each other would double or replace points.
    """

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__()
        self._home = directory.sync / "wandb"
        self._folder = temporary_name(self._home / "offline")

    def destination(self, run: Description) -> str:  # noqa: ARG002 - the same for every run
        """Name the folder of the files; see `Service`."""
        return "sync/wandb"

    def open(self, run: Description, known_id: str) -> OpenedRun:  # noqa: ARG002 - the digest is the id at W&B
        """Begin a folder; see `Service`."""
        self._home.mkdir(parents=True, exist_ok=True)
        for leftover in self._home.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._folder.mkdir()
        self._open(run, self._folder, "offline")
        return OpenedRun(run_id=run.digest, address="", last_step=NOTHING)

    def send(self, rows: Sequence[Row], *, in_doubt: bool) -> None:  # noqa: ARG002 - the folder is new
        """Write the rows; see `Service`."""
        for row in rows:
            self._log(row)

    def close(self, reported: ReportedState) -> None:
        """Complete the folder, and put it in the place of the earlier one; see `Service`."""
        super().close(reported)
        (new_folder,) = (self._folder / "wandb").glob("offline-run-*")
        before = [path for path in self._home.glob("offline-run-*") if path.name != new_folder.name]
        shutil.rmtree(self._home / new_folder.name, ignore_errors=True)  # made in the same second
        new_folder.replace(self._home / new_folder.name)
        fsync_directory(self._home)
        for path in before:
            shutil.rmtree(path, ignore_errors=True)
        self.abandon()

    def abandon(self) -> None:
        """Remove what is incomplete; see `Service`."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _project_of(run: Description) -> str:
    return run.key("wandb", "project") or "hpctrain"


def _converted(kind: str, path: Path) -> Any:
    import wandb

    if kind in ("image", "figure"):
        return wandb.Image(str(path))
    if kind == "audio":
        return wandb.Audio(str(path))
    if kind == "text":
        text = html.escape(path.read_text(encoding="utf-8", errors="replace"))
        return wandb.Html(f"<pre>{text}</pre>", inject=False)
    content = json.loads(path.read_bytes())
    if kind == "table":
        return wandb.Table(columns=content["columns"], data=_columns_alike(content["data"])[:MAX_TABLE_ROWS])
    if kind == "histogram" and content["counts"]:
        return wandb.Histogram(np_histogram=(content["counts"], content["edges"]))
    return None


def _columns_alike(rows: list[list[Any]]) -> list[list[Any]]:
    """Rows in which each column has one type, as W&B's tables require: texts where types are mixed."""
    mixed = [len({_sort(cell) for cell in column if cell is not None}) > 1 for column in zip(*rows, strict=True)]
    return [[str(cell) if mixed[n] and cell is not None else cell for n, cell in enumerate(row)] for row in rows]


def _sort(cell: object) -> str:
    return "number" if isinstance(cell, int | float) and not isinstance(cell, bool) else type(cell).__name__
