"""Read every byte of a run's checkpoints, compare the checksums, and show what they hold.

examples:
  python -m hpctrain inspect runs/digits/2026-01-31_12-00-00
  python -m hpctrain inspect digits --json      # the one run under runs/digits
  python -m hpctrain inspect digits --quick     # compare names and sizes only

step, samples_seen, world_size, weights_digest and config_digest are those of the newest intact checkpoint.
weights_digest is a SHA-256 over the model's named tensors: two runs with the same digest have the same weights.
The best checkpoint is the intact one whose step had the best evaluation, by the run's own metric.

Of a program's run (`run --`), the saves are shown that the program reported, and whether they still exist; then the
newest files in HPCTRAIN_CHECKPOINT_DIR that it didn't report. What is in them is the program's own affair.

Exit code 0; 1 if the run has saved checkpoints and none of them is intact, or saves and none exists; 2 if RUN is not a
run.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cli.arguments import add_runs, chosen_run, command_parser
from hpctrain.config.plain_yaml import is_program
from hpctrain.errors import ExitCode
from hpctrain.files import TEMPORARY_PREFIX
from hpctrain.phrases import byte_size, local_time
from hpctrain.run.checkpoints import BestCheckpoint, CheckpointInfo, list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import gone_step
from hpctrain.run.saves import ReportedSave, read_saves, unreported_files

SHOWN = 5
"""Files that are listed though they weren't reported; the others are only counted."""
HOW_TO_REPORT = "`python -m hpctrain run --help` shows how"
_NEWEST_FIELDS = ("step", "samples_seen", "world_size", "weights_digest", "config_digest")


def main(arguments: list[str]) -> int:
    """Show the checkpoints; ``arguments`` are those after `inspect`."""
    parser = command_parser("inspect", __doc__)
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="compare names and sizes, not every byte")
    options = parser.parse_args(arguments)
    directory = chosen_run(options)
    if is_program(directory.config):
        of_program = _saves_report(directory)
        print(json.dumps(of_program, indent=2) if options.json else _saves_table(of_program))
        return ExitCode.FAILED if of_program["saves"] and of_program["step"] is None else ExitCode.FINISHED
    checkpoints = list_checkpoints(directory, verify=not options.quick)
    report = _report(directory, checkpoints)
    print(json.dumps(report, indent=2) if options.json else _table(report, checkpoints))
    lost = report["step"] is None and (checkpoints or report["gone_step"] is not None)
    return ExitCode.FAILED if lost else ExitCode.FINISHED


def _report(directory: RunDirectory, checkpoints: list[CheckpointInfo]) -> dict[str, Any]:
    newest = next((info for info in reversed(checkpoints) if info.intact), None)
    best = BestCheckpoint.of(directory, checkpoints)
    return {
        "run_dir": str(directory.path),
        **{name: getattr(newest, name, None) for name in _NEWEST_FIELDS},
        "best": None if best.info is None else best.info.step,
        "best_warning": best.warning,
        "checkpoints": [
            {
                "step": info.step,
                "path": str(info.path),
                "intact": info.intact,
                "bytes": info.bytes,
                "problem": info.problem,
                "score": None if info.score is None else asdict(info.score),
            }
            for info in checkpoints
        ],
        "gone_step": gone_step(directory),
        "set_aside": [str(path) for path in directory.set_aside()],
        "unfinished": sorted(str(path) for path in directory.checkpoints.glob(f"{TEMPORARY_PREFIX}*")),
    }


def _table(report: dict[str, Any], checkpoints: list[CheckpointInfo]) -> str:
    lines = [f"run             {os.path.relpath(report['run_dir'])}"]
    lines += [f"{name:<14}  {'-' if report[name] is None else report[name]}" for name in _NEWEST_FIELDS]
    lines += ["checkpoints" if checkpoints else "checkpoints     none"]
    if report["gone_step"] is not None:
        lines += [f"  step {report['gone_step']}, which the run saved, is gone"]
    for info in reversed(checkpoints):
        saved_at = "-" if info.time is None else local_time(info.time)
        condition = "intact" if info.intact else f"damaged: {info.problem}"
        if info.score is not None:
            which = "the best on disk" if report["best_warning"] else "the best"
            best = f", {which}" if info.step == report["best"] else ""
            condition += f"  {info.score.name} {info.score.value:.6g}{best}"
        lines.append(f"  {info.path.name}  {byte_size(info.bytes):>10}  {saved_at:<19}  {condition}")
    lines += [f"  {Path(path).name}  damaged: skipped by a resume" for path in report["set_aside"]]
    unfinished = "unfinished: still being written, or left by a crash"
    lines += [f"  {Path(path).name}  {unfinished}" for path in report["unfinished"]]
    lines += [f"warning         {report['best_warning']}"] if report["best_warning"] else []
    return "\n".join(lines)


def _saves_report(directory: RunDirectory) -> dict[str, Any]:
    """Describe the saves in order, each path once, with the newest report of it; ``step`` is that of the newest one."""
    newest: dict[Path, ReportedSave] = {}
    for save in read_saves(directory):
        newest.pop(save.path, None)  # its place is that of its newest report: two may have the same time
        newest[save.path] = save
    saves = list(newest.values())
    existing_steps = [save.step for save in saves if os.path.exists(save.path)]  # noqa: PTH110 - never raises
    files = unreported_files(directory)
    return {
        "run_dir": str(directory.path),
        "step": existing_steps[-1] if existing_steps else None,
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


def _saves_table(report: dict[str, Any]) -> str:
    """Format `_saves_report`, newest first."""
    lines = [f"run             {os.path.relpath(report['run_dir'])}"]
    lines.append(f"step            {'-' if report['step'] is None else report['step']}")
    lines.append("saves" if report["saves"] else f"saves           none reported: {HOW_TO_REPORT}")
    width = max((len(str(save["step"])) for save in report["saves"]), default=0)
    for save in reversed(report["saves"]):
        size = byte_size(save["bytes"]) if save["exists"] else "gone"
        when = local_time(save["time"])
        lines.append(f"  step {save['step']:<{width}}  {size:>10}  {when}  {os.path.relpath(save['path'])}")
    if unreported := report["unreported"]:
        lines.append("not reported")
        for file in unreported[:SHOWN]:
            description = f"{byte_size(file['bytes']):>10}  {local_time(file['time'])}  {os.path.relpath(file['path'])}"
            lines.append(f"  {description}")
        if len(unreported) > SHOWN:
            lines.append(f"  and {len(unreported) - SHOWN} more")
    return "\n".join(lines)


def _size(path: Path) -> int:
    try:
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:  # the program may be removing it
        return 0
