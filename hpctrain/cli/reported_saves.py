"""What `inspect` shows of a program's run: the saves that the program reported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpctrain.phrases import byte_size, local_time
from hpctrain.run.directory import RunDirectory
from hpctrain.run.saves import Save, read_saves, unreported_files

SHOWN = 5
"""Files that are listed though they weren't reported; the others are only counted."""
HOW = "`python -m hpctrain run --help` shows how"


def saves_report(directory: RunDirectory) -> dict[str, Any]:
    """Describe the saves in order, each path once, with the newest report of it; ``step`` is that of the newest one."""
    newest: dict[Path, Save] = {}
    for save in read_saves(directory):
        newest.pop(save.path, None)  # its place is that of its newest report: two may have the same time
        newest[save.path] = save
    saves = list(newest.values())
    there = [save.step for save in saves if os.path.exists(save.path)]  # noqa: PTH110 - never raises
    files = unreported_files(directory)
    return {
        "run_dir": str(directory.path),
        "step": there[-1] if there else None,
        "saves": [
            {
                "step": save.step,
                "path": str(save.path),
                "exists": os.path.exists(save.path),  # noqa: PTH110
                "bytes": _size(save.path),
                "time": save.time,
                "attempt": save.attempt,
            }
            for save in saves
        ],
        "unreported": [{"path": str(path), "bytes": _size(path), "time": when} for path, when in files],
    }


def saves_table(report: dict[str, Any]) -> str:
    """Format `saves_report`, newest first."""
    lines = [f"run             {os.path.relpath(report['run_dir'])}"]
    lines.append(f"step            {'-' if report['step'] is None else report['step']}")
    lines.append("saves" if report["saves"] else f"saves           none reported: {HOW}")
    width = max((len(str(save["step"])) for save in report["saves"]), default=0)
    for save in reversed(report["saves"]):
        size = byte_size(save["bytes"]) if save["exists"] else "gone"
        when = local_time(save["time"])
        lines.append(f"  step {save['step']:<{width}}  {size:>10}  {when}  {os.path.relpath(save['path'])}")
    if unreported := report["unreported"]:
        lines.append("not reported")
        for file in unreported[:SHOWN]:
            shown = f"{byte_size(file['bytes']):>10}  {local_time(file['time'])}  {os.path.relpath(file['path'])}"
            lines.append(f"  {shown}")
        if len(unreported) > SHOWN:
            lines.append(f"  and {len(unreported) - SHOWN} more")
    return "\n".join(lines)


def _size(path: Path) -> int:
    try:
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:  # the program may be removing it
        return 0
