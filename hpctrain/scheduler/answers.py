"""The answers of squeue, scontrol and sacct, read into records."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.errors import SchedulerError
from hpctrain.scheduler import fields
from hpctrain.scheduler.job import JobState, SlurmJob

_NO_TASK = "4294967294"  # of an array without tasks left in the queue, up to SLURM 22.05
# each has a line to itself, since users choose the value, spaces included
_ALONE = (
    *("Comment", "Command", "SubmitLine", "WorkDir", "StdErr", "StdIn", "StdOut"),
    *("AdminComment", "SystemComment", "Extra"),
)
# users type spaces, fields of their own and even line breaks into a job's name
_NAME = re.compile(r"(?P<ids>[^\n]*?) JobName=.*?\n(?P<rest> +UserId=.*)", re.DOTALL)
_NEXT_ROW = re.compile(r"\n(?=\d+(?:_\S+)?\|\d+\|)")  # each begins with the job's id and number
_NODE_FIELD = re.compile(r"(?:^|\s)(NodeName|State|SlurmdStartTime)=(\S*)")
# without DRAIN: a draining node still runs its jobs
_LOST = {
    "DOWN",
    "FAIL",
    "FAILING",
    "NOT_RESPONDING",
    "NO_RESPOND",
    "POWERED_DOWN",
    "REBOOT",
    "REBOOT_ISSUED",
    "UNKNOWN",
}
"""Parts of a node's state, which SLURM joins by `+`, that mean that the node is down or was abandoned."""


def _flag(value: str) -> bool | None:
    number = fields.optional_number(value)
    return None if number is None else number > 0


def _is_zero(value: str) -> bool:
    return value.strip() == "0"


_COLUMNS = (
    # field of a SlurmJob, its columns in squeue, scontrol and sacct, and the function that parses the value
    ("job_id", "JobArrayID", "JobArrayID", "JobID", str.strip),
    ("number", "JobID", "JobId", "JobIDRaw", fields.number),
    ("state", "State", "JobState", "State", JobState.parse),
    ("restarts", "RestartCnt", "Restarts", None, fields.optional_number),
    ("start_time", "StartTime", "StartTime", "Start", fields.moment),
    ("end_time", "EndTime", "EndTime", "End", fields.moment),
    ("preempt_time", "PreemptTime", "PreemptTime", None, fields.moment),
    ("requeue", "Requeue", "Requeue", None, _flag),
    ("held", "PriorityLong", "Priority", None, _is_zero),
    # last, because burst buffer plugins put the messages of their scripts into it, bars and line breaks included
    ("reason", "Reason", "Reason", "Reason", fields.text),
)
_READ = {row[0]: row[4] for row in _COLUMNS}
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
    return max(1, min(fields.number(found[1]) for found in (size, tasks) if found))


def failed_nodes(answer: str, since: float) -> tuple[str, ...]:
    """Find the nodes that are down, or whose slurmd started after a given time, because they died and came back.

    Args:
        answer: of `scontrol --oneliner show node`, with times in seconds since the epoch.
        since: epoch seconds.
    """
    found = []
    for line in answer.splitlines():
        values = dict(_NODE_FIELD.findall(line))
        state, started = values.get("State", ""), values.get("SlurmdStartTime", "")
        # the star is SLURM's mark of a node that doesn't respond
        lost = set(state.rstrip("*").split("+")) & _LOST or state.endswith("*")
        if "NodeName" in values and (lost or (started.isdigit() and int(started) > since)):
            found.append(values["NodeName"])
    return tuple(found)


def batch_host(answer: str) -> str | None:
    """Parse the node of the batch script from the output of `scontrol show job`; None before it began."""
    found = re.search(r"^ +BatchHost=(\S+)", answer, re.MULTILINE)
    return None if found is None else fields.text(found[1]) or None


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
    return SlurmJob(**{name: _READ[name](value) for name, value in values.items()})  # type: ignore[arg-type]


def _scontrol_block(block: str) -> SlurmJob:
    found = _scontrol_fields(block)
    found |= {"JobArrayID": _scontrol_id(found)}
    found |= {name: found.get(name, "") for name in ("PreemptTime", "Priority")}
    missing = [column for column in _SCONTROL.values() if column not in found]
    if missing:
        raise SchedulerError(f"expected {missing[0]} in scontrol's answer, found {block!r}")
    return _job({name: found[column] for name, column in _SCONTROL.items()})


def _scontrol_fields(block: str) -> dict[str, str]:
    """Parse fields by name; user-written values end their line, so they can't be mistaken for another field."""
    parts = _NAME.fullmatch(block)
    if parts is None:
        raise _unreadable("scontrol", block)
    found: dict[str, str] = {}
    for line in (parts["ids"], *parts["rest"].split("\n")):
        if line.strip().partition("=")[0] in _ALONE:
            continue
        for token in line.split():
            key, _, value = token.partition("=")
            found.setdefault(key, value)
    return found


def _scontrol_id(found: dict[str, str]) -> str:
    array, task = found.get("ArrayJobId"), found.get("ArrayTaskId", "N/A")
    if array is None:
        return found.get("JobId", "")
    if task in {_NO_TASK, "N/A"}:
        return array
    return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"


def _unreadable(command: str, found: str) -> SchedulerError:
    return SchedulerError(f"expected {command} to answer as SLURM 20.11 or later does, found {found[:400]!r}")
