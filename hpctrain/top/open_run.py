"""The run that the user has opened: all of its curves, its attempts, and its log."""

from __future__ import annotations

import itertools
import re
from collections import deque
from pathlib import Path

from hpctrain.files import describe_os_error, json_lines
from hpctrain.phrases import counted, duration, listed, local_time
from hpctrain.run.growing_file import NOTHING, GrowingFile, start_of_last_lines
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Attempt
from hpctrain.status.metrics import metrics_of
from hpctrain.terminal import visible
from hpctrain.top.curve import LiveCurve
from hpctrain.top.watched_run import TRUSTED_S, WatchedRun

CURVE_BYTES = 16 * 2**20
"""Bytes at the end of metrics.jsonl from which the curves are drawn."""
LOG_LINES = 500
"""Lines of the log that are kept."""
LONGEST_LINE_BYTES = 2**16
"""Bytes of the end of a longer line that are shown: a file of zeros is one line."""
CHUNKS = 64
"""Reads of a log in one look."""
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")


class OpenRun:
    """A run whose details are read.

    Args:
        run: as it is watched.

    Attributes:
        curves: by the metric's name.
        lacks_best: whether the run has ended, and the checkpoint of its best evaluation isn't on disk.
        log_path: of the log; None before there is one.
        log: its last lines.
        log_version: changes with the log.
    """

    def __init__(self, run: WatchedRun) -> None:
        self.run = run
        self.curves: dict[str, LiveCurve] = {}
        self.lacks_best = False
        self.log_path: Path | None = None
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.log_version = 0
        self._metrics = GrowingFile(run.directory.metrics, -CURVE_BYTES, trusted_s=TRUSTED_S)
        self._log_file: GrowingFile | None = None
        self._torn = b""

    def look(self) -> None:
        """Read what is new."""
        status = self.run.status
        step = None if status.state.may_change else status.best_step
        self.lacks_best = step is not None and not self.run.directory.checkpoint(step).exists()
        try:
            self._read_curves()
        except OSError:
            self.curves = {}
        try:
            self._read_log()
        except OSError as error:
            self._log_file = None
            note = visible(f"the log can't be read: {describe_os_error(error)}")
            if not self.log or self.log[-1] != note:
                self.log.append(note)
                self.log_version += 1

    def _read_curves(self) -> None:
        appended = self._metrics.read_lines()
        # the screen draws from another thread: a new mapping, and not this one emptied
        curves = {} if appended.anew else dict(self.curves)
        for record in metrics_of(json_lines(appended.lines)):
            for name, value in record.values.items():
                curves.setdefault(name, LiveCurve()).add(record.step, value)
        self.curves = curves

    def _read_log(self) -> None:
        path = self._path()
        if path is None:
            return
        if self._log_file is None or path != self.log_path:
            self.log_path = path
            self.log.clear()
            self.log_version += 1
            self._torn = b""
            self._log_file = GrowingFile(path, start_of_last_lines(path, LOG_LINES))
        # a log that grows faster than it is read is read on at the next look
        for appended in itertools.islice(iter(self._log_file.read, NOTHING), CHUNKS):
            *lines, torn = (self._torn + appended.data).split(b"\n")
            self._torn = torn[-LONGEST_LINE_BYTES:]
            self.log.extend(map(_plain, lines[-LOG_LINES:]))
            self.log_version += 1

    def _path(self) -> Path | None:
        directory = self.run.directory
        paths = [directory.rank_log(0)]
        if (batch_log := JobRecords(directory).batch_log) is not None:
            paths.append(batch_log)
        return next((path for path in paths if path.is_file() and path.stat().st_size), None)


def attempt_lines(attempts: tuple[Attempt, ...]) -> list[str]:
    """One or two lines per attempt, the newest first."""
    lines = []
    for attempt in reversed(attempts):
        began = "?" if attempt.start_time is None else local_time(attempt.start_time)
        steps = f"steps {attempt.start_step or 0} to {'?' if attempt.end_step is None else attempt.end_step}"
        ranks = counted(attempt.world_size, "rank") if attempt.world_size else "? ranks"
        where = f"{ranks} on {listed(attempt.nodes, shown=4) or '?'}"
        job = f", job {attempt.job_id}" if attempt.job_id else ""
        lines.append(f"{attempt.attempt:>3}  {began}  {steps}  {where}{job}")
        lines.append(f"     {_end(attempt)}")
    return lines or ["no attempt has begun"]


def _end(attempt: Attempt) -> str:
    if attempt.reason is None:
        return "no end is recorded"
    times = (attempt.start_time, attempt.end_time)
    after = f" after {duration(times[1] - times[0])}" if times[0] is not None and times[1] is not None else ""
    return f"{attempt.reason}{after}{f': {attempt.detail}' if attempt.detail else ''}"


def _plain(line: bytes) -> str:
    """A line of a log without its colours, and with only the last state of a progress bar."""
    text = _COLOURS.sub("", line[-LONGEST_LINE_BYTES:].decode(errors="replace").rstrip("\r"))
    return visible(text.rpartition("\r")[2].expandtabs())
