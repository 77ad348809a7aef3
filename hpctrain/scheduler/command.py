"""SLURM's commands: run, and their answers read into records."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpctrain.errors import SchedulerError, SchedulerMissingError
from hpctrain.scheduler.job import JobState, SlurmJob

# a user's filters and formats would change the answers
_FORMAT_VARIABLES = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_")
_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|connection refused|timed out|configuration source|configuration file"
    r"|accounting storage is disabled|problem talking to the database|controller not responding"
    r"|zero bytes were transmitted|message (send|receive) failure|backup controller in standby",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"invalid job id specified|job \S+ not found", re.IGNORECASE)
_MISSING_VALUES = frozenset({"", "(null)", "None", "NONE", "N/A", "n/a", "Unknown", "NOT_SET"})
_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_MOST_TASKS = 4_000_001  # SLURM's own bound on MaxArraySize

log = logging.getLogger("hpctrain.scheduler")


class UnknownJobError(SchedulerError):
    """SLURM doesn't know the job, or no longer remembers it."""


class SchedulerSilentError(SchedulerMissingError):
    """The command is installed, but SLURM didn't answer: a retry may help."""


def run(arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> str:
    """Run one of SLURM's commands.

    Args:
        arguments: the command's name, found by the PATH of `environ`, and its arguments.
        environ: environment variables.
        timeout_s: seconds after which the command is killed.

    Returns:
        Its output, with times in seconds since the epoch and messages in English.

    Raises:
        SchedulerMissingError: the command isn't installed.
        SchedulerSilentError: the controller or the database didn't answer, or a signal ended the command.
        UnknownJobError: SLURM doesn't know the job.
        SchedulerError: SLURM rejected the command for another reason.
    """
    variables = {name: value for name, value in environ.items() if not name.startswith(_FORMAT_VARIABLES)}
    # the patterns above match English messages
    variables |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    text = " ".join(part for part in arguments if not part.startswith("--") or part.startswith("--jobs="))
    try:
        process = subprocess.run(
            arguments,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise SchedulerMissingError(
            f"expected SLURM's command {arguments[0]} in PATH: {error.strerror}; load SLURM's module, or type this on "
            "a login node"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerSilentError(f"{text}: SLURM did not answer within {timeout_s:g} s; try again later") from error
    if process.returncode:
        raise _failure(text, process)
    return process.stdout


def _failure(text: str, process: subprocess.CompletedProcess[str]) -> SchedulerError:
    if process.returncode < 0:
        # without cgroups SLURM signals every process of a job, including this command
        return SchedulerSilentError(f"{text}: ended by {signal.Signals(-process.returncode).name}, without an answer")
    message = " ".join((process.stderr or process.stdout).split()) or f"exit code {process.returncode}"
    if _UNKNOWN_JOB.search(message):
        return UnknownJobError(f"{text}: {message}")
    if _UNREACHABLE.search(message):
        return SchedulerSilentError(f"{text}: {message}")
    return SchedulerError(f"{text}: {message}")


def parse_text(value: str) -> str:
    """Parse a text; empty for any of SLURM's spellings of a missing value."""
    return "" if value.strip() in _MISSING_VALUES else value.strip()


def parse_number(value: str) -> int:
    """Parse a whole number.

    Raises:
        SchedulerError: it isn't a number.
    """
    try:
        return int(value)
    except ValueError:
        raise SchedulerError(f"expected a number in SLURM's answer, found {value!r}") from None


def parse_optional_number(value: str) -> int | None:
    """Parse a whole number that hpctrain can do without; None if it isn't one, which is logged."""
    try:
        return parse_number(value)
    except SchedulerError:
        log.warning("can't parse the number %r in SLURM's answer; treating it as unknown", value)
        return None


def parse_time(value: str) -> int | None:
    """Parse a time in seconds since the epoch, as `command.run` has SLURM print it; None if there is none."""
    return (parse_optional_number(value) or None) if parse_text(value) else None


def array_tasks(job_id: str) -> list[str]:
    """Expand the id of a row: `12_[4-6%2]` into `12_4`, `12_5` and `12_6`; any other id into itself.

    Raises:
        SchedulerError: the tasks can't be read.
    """
    array, bracket, tasks = job_id.partition("_[")
    if not bracket:
        return [job_id]
    ids: list[str] = []
    for part in tasks.rstrip("]").split("%")[0].split(","):
        match = _TASKS.fullmatch(part)
        if match is None or int(match[2] or 0) > _MOST_TASKS:
            raise SchedulerError(f"expected the tasks of a job array such as 12_[4-6%2], found {job_id!r}")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        ids += (f"{array}_{task}" for task in range(first, last + 1, step))
    return ids


_NO_TASK = "4294967294"  # of an array without tasks left in the queue, up to SLURM 22.05
# each has a line to itself, since users choose the value, spaces included
_LINE_FIELDS = (
    *("Comment", "Command", "SubmitLine", "WorkDir", "StdErr", "StdIn", "StdOut"),
    *("AdminComment", "SystemComment", "Extra"),
)
# users type spaces, fields of their own and even line breaks into a job's name
_NAME = re.compile(r"(?P<ids>[^\n]*?) JobName=.*?\n(?P<rest> +UserId=.*)", re.DOTALL)
_NEXT_ROW = re.compile(r"\n(?=\d+(?:_\S+)?\|\d+\|)")  # each begins with the job's id and number
_NODE_FIELD = re.compile(r"(?:^|\s)(NodeName|State|SlurmdStartTime)=(\S*)")
# without DRAIN: a draining node still runs its jobs
_DOWN_STATES = {
    *("DOWN", "FAIL", "FAILING", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN", "REBOOT", "REBOOT_ISSUED", "UNKNOWN")
}
"""Parts of a node's state, which SLURM joins by `+`, that mean that the node is down or was abandoned."""


def _flag(value: str) -> bool | None:
    number = parse_optional_number(value)
    return None if number is None else number > 0


def _is_zero(value: str) -> bool:
    return value.strip() == "0"


_COLUMNS = (
    # field of a SlurmJob, its columns in squeue, scontrol and sacct, and the function that parses the value
    ("job_id", "JobArrayID", "JobArrayID", "JobID", str.strip),
    ("number", "JobID", "JobId", "JobIDRaw", parse_number),
    ("state", "State", "JobState", "State", JobState.parse),
    ("restarts", "RestartCnt", "Restarts", None, parse_optional_number),
    ("start_time", "StartTime", "StartTime", "Start", parse_time),
    ("end_time", "EndTime", "EndTime", "End", parse_time),
    ("preempt_time", "PreemptTime", "PreemptTime", None, parse_time),
    ("requeue", "Requeue", "Requeue", None, _flag),
    ("is_held", "PriorityLong", "Priority", None, _is_zero),
    # last, because burst buffer plugins put the messages of their scripts into it, bars and line breaks included
    ("reason", "Reason", "Reason", "Reason", parse_text),
)
_PARSERS: Mapping[str, Callable[[str], Any]] = {row[0]: row[4] for row in _COLUMNS}
_SQUEUE = {row[0]: row[1] for row in _COLUMNS}
_SCONTROL = {row[0]: row[2] for row in _COLUMNS}
_SACCT = {row[0]: row[3] for row in _COLUMNS if row[3]}

SQUEUE_FORMAT = ",".join(f"{column}:|" for column in _SQUEUE.values())
"""For `squeue --Format`: a suffix instead of a width prevents truncation."""
SACCT_FORMAT = ",".join(_SACCT.values())


def squeue(answer: str) -> list[SlurmJob]:
    """Parse the output of `squeue --noheader --Format=SQUEUE_FORMAT`.

    Raises:
        SchedulerError: it can't be read.
    """
    return [_record("squeue", _SQUEUE, row.removesuffix("|")) for row in _rows(answer)]


def scontrol(answer: str) -> list[SlurmJob]:
    """Parse the output of `scontrol show job`, one block per job.

    Raises:
        SchedulerError: it can't be read.
    """
    return [_scontrol_block(block) for block in re.split(r"\n\n(?=JobId=)", answer) if block.strip()]


def sacct(answer: str) -> list[SlurmJob]:
    """Parse the output of `sacct --noheader --parsable2 --allocations --format=SACCT_FORMAT`.

    Raises:
        SchedulerError: it can't be read.
    """
    return [_record("sacct", _SACCT, row) for row in _rows(answer)]


def largest_array(answer: str) -> int:
    """Parse how many tasks a job array may have from the output of `scontrol show config`; 1 without arrays.

    Raises:
        SchedulerError: it has no MaxArraySize.
    """
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", answer, re.MULTILINE)
    if size is None:
        raise SchedulerError("expected MaxArraySize in the output of `scontrol show config`")
    # a site may allow larger task numbers than tasks, for arrays such as 100000-100010
    tasks = re.search(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", answer, re.MULTILINE)
    return max(1, min(parse_number(match[1]) for match in (size, tasks) if match))


def failed_nodes(answer: str, since: float) -> tuple[str, ...]:
    """Find the nodes that are down, or whose slurmd started after a given time, because they died and came back.

    Args:
        answer: of `scontrol --oneliner show node`, with times in seconds since the epoch.
        since: epoch seconds.
    """
    nodes = []
    for line in answer.splitlines():
        values = dict(_NODE_FIELD.findall(line))
        state, start_time = values.get("State", ""), values.get("SlurmdStartTime", "")
        # the star marks a node that doesn't respond; on SLURM 20.11 it follows the base state, as in DOWN*+DRAIN
        lost = "*" in state or set(state.split("+")) & _DOWN_STATES
        if "NodeName" in values and (lost or (start_time.isdigit() and int(start_time) > since)):
            nodes.append(values["NodeName"])
    return tuple(nodes)


def batch_host(answer: str) -> str | None:
    """Parse the node of the batch script from the output of `scontrol show job`; None before it began."""
    match = re.search(r"^ +BatchHost=(\S+)", answer, re.MULTILINE)
    return None if match is None else parse_text(match[1]) or None


def _rows(answer: str) -> list[str]:
    rows = answer.removesuffix("\n")
    return _NEXT_ROW.split(rows) if rows else []


def _record(command: str, columns: Mapping[str, str], row: str) -> SlurmJob:
    values = row.split("|", len(columns) - 1)
    if len(values) != len(columns):
        raise _unreadable(command, row)
    return _job(dict(zip(columns, values, strict=True)))


def _job(values: Mapping[str, str]) -> SlurmJob:
    """Make a record from the text of its fields."""
    return SlurmJob(**{name: _PARSERS[name](value) for name, value in values.items()})


def _scontrol_block(block: str) -> SlurmJob:
    fields = _scontrol_fields(block)
    fields |= {"JobArrayID": _scontrol_id(fields)}
    fields |= {name: fields.get(name, "") for name in ("PreemptTime", "Priority")}
    missing = [column for column in _SCONTROL.values() if column not in fields]
    if missing:
        raise SchedulerError(f"expected {missing[0]} in scontrol's answer, found {block!r}")
    return _job({name: fields[column] for name, column in _SCONTROL.items()})


def _scontrol_fields(block: str) -> dict[str, str]:
    """Parse fields by name; user-written values end their line, so they can't be mistaken for another field."""
    parts = _NAME.fullmatch(block)
    if parts is None:
        raise _unreadable("scontrol", block)
    fields: dict[str, str] = {}
    for line in (parts["ids"], *parts["rest"].split("\n")):
        if line.strip().partition("=")[0] in _LINE_FIELDS:
            continue
        for token in line.split():
            key, _, value = token.partition("=")
            fields.setdefault(key, value)
    return fields


def _scontrol_id(fields: dict[str, str]) -> str:
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "N/A")
    if array is None:
        return fields.get("JobId", "")
    if task in {_NO_TASK, "N/A"}:
        return array
    return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"


def _unreadable(command: str, answer: str) -> SchedulerError:
    return SchedulerError(f"expected {command} to answer as SLURM 20.11 or later does, found {answer[:400]!r}")
