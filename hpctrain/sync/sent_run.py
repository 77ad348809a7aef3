"""Run metadata and rows sent to a service."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from hpctrain.config.logger import SERVICES
from hpctrain.config.plain_yaml import SECRET_KEYS, parse_plain_config
from hpctrain.config.root import flat_values
from hpctrain.files import (
    LARGEST_BYTES,
    LARGEST_LOG_BYTES,
    is_private,
    json_lines,
    open_below,
    read_json_or_empty,
    write_json,
)
from hpctrain.run.config_change import trained_varied
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import read_evaluation
from hpctrain.run.growing_file import NOTHING, GrowingFile
from hpctrain.run.ledger import Ledger
from hpctrain.run.manifest import varied_text
from hpctrain.run.record_fields import COUNT, TIME
from hpctrain.status.metrics import LoggedMetrics, metrics_of

NOT_SENT = (*SECRET_KEYS, *(f"logger.{name}" for name in SERVICES))
"""Keys that stay here, with those below them: variables and commands may be secret, the rest is about the service."""
NAME_CHARS = 128
DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A run.

    Attributes:
        digest: identifies it, as `identify` returned it.
        name: for people.
        group: the sweep's folder; empty for a run of its own.
        config: its configuration, by full key, without variables of the environment.
        varied: the keys that its sweep varied, with this run's values; without variables of the environment.
        started: when it was launched first, in epoch seconds.
        origin: the command, the commit, the host and the user that launched it, as far as they are known.
        settings: its group `logger` in plain containers.
        is_private: whether this user alone could have written them.
    """

    digest: str
    name: str
    group: str
    config: Mapping[str, Any]
    varied: Mapping[str, str]
    started: float
    origin: Mapping[str, str]
    settings: Mapping[str, Any]
    is_private: bool

    def key(self, service: str, name: str) -> Any:
        """The value of `logger.SERVICE.NAME`; None if the run was made before the key existed."""
        group = self.settings.get(service)
        return group.get(name) if isinstance(group, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedState:
    """The state of a run, as a sender reports it to a service before it leaves.

    Attributes:
        state: `completed`, `failed`, `cancelled`, or anything else for a run that may continue.
        summary: the best value, its step, and the reason for the end of the last attempt.
    """

    state: str
    summary: Mapping[str, float | int | str]

    @property
    def final(self) -> bool:
        """Whether the run is over, unless a user resumes it."""
        return self.state in ("completed", "failed", "cancelled")


def describe(directory: RunDirectory, digest: str) -> Description:
    """Describe a run by the files in its directory; what can't be read, or is a link, is left out.

    Args:
        directory: of the run.
        digest: identifies it.
    """
    manifest = read_json_or_empty(directory.manifest)
    config, private = _read_config(directory)
    all_varied = trained_varied(directory)
    varied = {key: value for key, value in all_varied.items() if not _stays_here(key)}
    folder, parent = directory.path.name, directory.path.parent.name
    of_sweep = bool(all_varied) or folder.isdecimal()
    git = manifest.get("git")
    commit = git.get("commit") if isinstance(git, dict) else None
    origin = {name: manifest.get(name) for name in ("host", "user")} | {"git_commit": commit}
    origin["command"] = _sent_command(str(manifest.get("command") or ""))
    logger = config.get("logger")
    started = manifest.get("time")
    return Description(
        digest=digest,
        name=" ".join(filter(None, [f"{parent}/{folder}", varied_text(varied)]))[:NAME_CHARS],
        group=parent if of_sweep else "",
        config={key: value for key, value in flat_values(config).items() if key and not _stays_here(key)},
        varied=varied,
        started=float(started) if started is not None and TIME.accepts(started) else 0.0,
        origin={name: str(value) for name, value in origin.items() if value},
        settings=logger if isinstance(logger, dict) else {},
        is_private=private,
    )


def _read_config(directory: RunDirectory) -> tuple[Mapping[str, Any], bool]:
    """Return the configuration, and whether this user alone could have written it."""
    try:
        with open_below(directory.path, directory.config.name, at_most=LARGEST_BYTES) as file:
            private = is_private(os.fstat(file.fileno())) and is_private(directory.path.stat())
            return parse_plain_config(file.read(), directory.config), private
    except OSError:
        return {}, False


def describe_state(directory: RunDirectory, state: str) -> ReportedState:
    """Describe how far a run has come.

    Args:
        directory: of the run.
        state: as `status` names it.
    """
    evaluation = directory.newest(read_evaluation)
    summary: dict[str, float | int | str] = {}
    if evaluation is not None and evaluation.best is not None:
        summary[f"best/{evaluation.best.name}"] = evaluation.best.value
        summary["best/step"] = evaluation.best_step or 0
    attempts = Ledger(directory).attempts()
    summary["hpctrain/attempts"] = len(attempts)
    summary["hpctrain/state"] = state
    if attempts and attempts[-1].reason is not None and attempts[-1].detail:
        summary["hpctrain/detail"] = attempts[-1].detail
    finite = {name: value for name, value in summary.items() if not isinstance(value, float) or math.isfinite(value)}
    return ReportedState(state=state, summary=finite)


def _stays_here(key: str) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in NOT_SENT)


def _sent_command(command: str) -> str:
    """A command line as typed, without the values of keys that stay here."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    # only changed words are spelled anew
    blanked = [_blanked(word) for word in words]
    return command if blanked == words else " ".join(word if "***" in word else shlex.quote(word) for word in blanked)


def _blanked(word: str) -> str:
    key = re.match(r"[-+~]*([\w.]+)[^=]*=", word)
    if key and _stays_here(key[1]):
        return f"{key[0]}***"
    # a whole group, or a program's text
    inside = any(prefix in word for prefix in NOT_SENT)
    group = any(word.lstrip("+").startswith(f"{prefix.partition('.')[0]}={{") for prefix in NOT_SENT)
    return "***" if inside or group else word


def identify(directory: RunDirectory) -> str:
    """Return the run's digest, in hexadecimal, and record it in ``sync/identity.json``.

    When a run is first sent, its digest is made from the manifest and the folder's name. A run directory is a copy if
    its record names another directory, and that one still holds a run with the same digest. So a copy whose original
    can't be seen counts as a moved run; and a copy that keeps the folder's name as the original, if neither was sent.

    Raises:
        OSError: the file system's error.
    """
    path = identity_path(directory)
    record = read_json_or_empty(path)
    here = str(directory.path)
    digest = record.get("digest")
    if not isinstance(digest, str) or not digest:
        # a run that started over is a new one to the services, which already have later steps
        before = sorted(path.parent.name for path in directory.earlier.glob(f"*/{directory.sync.name}"))
        digest = _digest([read_json_or_empty(directory.manifest), directory.path.name, *before])
    elif _is_copy(directory, record.get("directory"), digest):
        digest = _digest([digest, here])
    if record != {"digest": digest, "directory": here}:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"digest": digest, "directory": here})
    return digest


def identity_path(directory: RunDirectory) -> Path:
    """The file with the digest of a run, and with the directory in which it was sent last."""
    return directory.sync / "identity.json"


def _is_copy(directory: RunDirectory, recorded: object, digest: str) -> bool:
    if not isinstance(recorded, str) or recorded == str(directory.path):
        return False
    original = RunDirectory.at(recorded)
    if read_json_or_empty(identity_path(original)).get("digest") != digest:
        return False
    # one directory has one inode number under all its paths: links, and mounts whose device numbers differ
    return original.path.stat().st_ino != directory.path.stat().st_ino


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARS]


@dataclass(frozen=True, slots=True)
class SentMedium:
    """A medium, as media.jsonl records it.

    Attributes:
        name: as logged, such as `eval/samples`.
        kind: `image`, `figure`, `text`, `histogram`, `audio` or `table`.
        run: to which it belongs.
        file: its path below the run's directory.
    """

    name: str
    kind: str
    run: RunDirectory
    file: str

    @contextmanager
    def copied(self) -> Iterator[Path]:
        """Context manager that copies the file into a folder of this process, and yields the copy's path.

        A service's client opens a file by its path, where another user could put a link to a file of this user.

        Raises:
            OSError: the file can't be read, or is a link, or in a folder that is one.
        """
        with open_below(self.run.path, self.file) as file, TemporaryDirectory(prefix="hpctrain-media-") as folder:
            path = Path(folder, Path(self.file).name)
            with path.open("xb") as copy:
                shutil.copyfileobj(file, copy)
            yield path


@dataclass(slots=True)
class Row:
    """A step.

    Attributes:
        step: completed steps.
        time: of its last record, in epoch seconds; 0 if no record has a time.
        values: by the metric's name, NaN and infinities included; of several records with a name, the last counts.
        media: by name.
    """

    step: int
    time: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    media: dict[str, SentMedium] = field(default_factory=dict)


class Rows:
    """The rows of a run that weren't taken yet, read again and again while the run trains.

    Args:
        directory: of the run.
        after: the step up to which all rows were sent.
    """

    def __init__(self, directory: RunDirectory, after: int) -> None:
        self._directory = directory
        self._after = after
        self._rows: dict[int, Row] = {}
        self._start_over()

    def read(self) -> None:
        """Read what was logged since the last call."""
        records, media = map(self._records_in, self._files)
        while records is None or media is None:
            # a resume dropped records: what was read of either file may be void
            self._start_over()
            records, media = map(self._records_in, self._files)
        for logged in metrics_of(records):
            self._add(logged)
        for record in media:
            self._add_medium(record)

    def _start_over(self) -> None:
        paths = self._directory.metrics, self._directory.media_records
        self._files = [GrowingFile(path, opener=_open_records) for path in paths]
        self._rows.clear()

    def _records_in(self, file: GrowingFile) -> list[dict[str, Any]] | None:
        """The complete records since the last call; None if the file was replaced or removed."""
        new_records: list[dict[str, Any]] = []
        while (appended := file.read_lines()) != NOTHING:
            if appended.anew:
                return None
            # without those that were sent: all of a long run may not fit into memory
            records = (record for record in json_lines(appended.lines) if COUNT.accepts(record.get("step")))
            new_records += [record for record in records if record["step"] > self._after]
        return new_records

    def before(self, step: int | None) -> list[Row]:
        """Return the rows before a step, or all of them, in the order of their steps."""
        return [self._rows[number] for number in sorted(self._rows) if step is None or number < step]

    def mark_sent(self, rows: Sequence[Row]) -> None:
        """Forget the first rows that `before` returned: they were sent."""
        for row in rows:
            del self._rows[row.step]
        self._after = max(self._after, rows[-1].step)

    def continue_after(self, step: int) -> None:
        """Have the rows after a step, up to which all were sent; what was read isn't read again if it isn't needed."""
        if step < self._after:
            self._start_over()
        for number in [number for number in self._rows if number <= step]:
            del self._rows[number]
        self._after = step

    def _add(self, logged: LoggedMetrics) -> None:
        if logged.step > self._after:
            row = self._rows.setdefault(logged.step, Row(logged.step))
            row.time = logged.time or row.time
            row.values |= logged.values

    def _add_medium(self, record: dict[str, Any]) -> None:
        step, name, kind, file = (record.get(key) for key in ("step", "name", "kind", "file"))
        if not COUNT.accepts(step) or not all(isinstance(text, str) for text in (name, kind, file)):
            return
        # a user may have edited the record: nothing but the run's own media leaves the machine
        if not str(file).startswith(f"{self._directory.media.name}/"):
            return
        if step is not None and step > self._after:
            row = self._rows.setdefault(step, Row(step))
            if not row.time and TIME.accepts(record.get("time")):
                row.time = float(record["time"])
            row.media[str(name)] = SentMedium(str(name), str(kind), self._directory, str(file))


def _open_records(path: Path) -> BinaryIO:
    return open_below(path.parent, path.name, at_most=LARGEST_LOG_BYTES)
