"""A run of wandb's client, online or offline: how it is opened, and what a row becomes."""

from __future__ import annotations

import contextlib
import html
import json
import os
from pathlib import Path
from typing import Any, Literal

from hpctrain.files import describe_os_error
from hpctrain.sync.description import Description, ReportedState
from hpctrain.sync.rows import Row
from hpctrain.sync.service import ServiceError

INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 600.0
"""Seconds for what is still to be uploaded; rank zero ends its sender process earlier."""
MAX_TABLE_ROWS = 10_000
"""wandb's own bound."""
PREEMPTED = 1
"""Any exit code but 0: after `mark_preempting`, W&B then shows the run as preempted, and not as failed."""


def open_run(run: Description, *, folder: Path, mode: Literal["online", "offline"]) -> Any:
    """Begin or resume a run of wandb; its id is the run's digest.

    Args:
        run: the run.
        folder: where wandb writes its files.
        mode: `online` or `offline`.

    Raises:
        ServiceError: W&B can't be reached, or refuses.
    """
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
    try:
        # a folder `wandb` in the working directory may name another server, which would get the key
        with contextlib.chdir(folder):
            return wandb.init(
                entity=run.key("wandb", "entity"),
                project=project_of(run),
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
    except Exception as error:  # of many classes, which wandb doesn't document
        raise ServiceError(one_line(error)) from error


def project_of(run: Description) -> str:
    """The project at W&B that gets the run."""
    return run.key("wandb", "project") or "hpctrain"


def log_row(opened: Any, row: Row) -> None:
    """Log a row at its step.

    Args:
        opened: wandb's run.
        row: its step exceeds all earlier ones.

    Raises:
        ServiceError: wandb refuses.
    """
    values: dict[str, Any] = {**row.values, **media_of(opened, row)}
    if row.time:
        values["_timestamp"] = row.time
    try:
        opened.log(values, step=row.step)
    except Exception as error:
        raise ServiceError(one_line(error)) from error


def media_of(opened: Any, row: Row) -> dict[str, Any]:
    """Have the files of a row's media uploaded, and return what refers to them, by name.

    The name of a file at W&B depends on the row and the content alone, so that a file can be uploaded again.
    """
    found = {}
    for medium in row.media.values():
        try:
            with medium.copied() as path:
                converted = _converted(medium.kind, path)
                if hasattr(converted, "bind_to_run"):
                    # here and not in `log`, whose names contain the number of the call, and which makes an artifact of
                    # each table; it copies the file
                    converted.bind_to_run(opened, medium.name, row.step)
            if converted is not None:
                found[medium.name] = converted
        except Exception as error:  # a file that a resume or its user has removed, or that wandb doesn't take
            why = describe_os_error(error) if isinstance(error, OSError) else one_line(error)
            print(f"{medium.name} of step {row.step} is left out: {why}", flush=True)
    return found


def close_run(opened: Any, reported: ReportedState) -> None:
    """Report a run's end, and wait until W&B has everything.

    Raises:
        ServiceError: it didn't take everything in time.
    """
    try:
        opened.summary.update(dict(reported.summary))
        if reported.state == "completed":
            code = 0
        else:
            if reported.state != "failed":
                opened.mark_preempting()
            code = PREEMPTED
        opened.finish(exit_code=code)
    except Exception as error:
        raise ServiceError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """An error of a client in one line, without what a terminal needs to colour it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(char for char in text if char.isprintable())[:500]


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


def address_of(opened: Any) -> str:
    """The address of a run's page; empty offline."""
    return str(opened.url or "")
