"""The answers of squeue, scontrol and sacct, read into records."""

from __future__ import annotations

import re

from hpctrain.errors import SchedulerError
from hpctrain.scheduler import fields
from hpctrain.scheduler.job import JobRecord, JobState

FIELD_END, ROW_END = "\x1f", "\x1e"
"""Nothing that a person types into a job's name: spaces, bars and even line ends can be there."""

_SQUEUE = (
    "JobArrayID",
    "JobID",
    "Name",
    "Partition",
    "State",
    "Reason",
    "RestartCnt",
    "exit_code",
    "SubmitTime",
    "EligibleTime",
    "StartTime",
    "EndTime",
    "PreemptTime",
    "TimeLimit",
    "NodeList",
    "BatchHost",
    "Requeue",
)
SQUEUE_FORMAT = ",".join(f"{name}:{FIELD_END}" for name in _SQUEUE[:-1]) + f",{_SQUEUE[-1]}:{ROW_END}"
"""For `squeue --Format`: a suffix instead of a width means that nothing is cut off."""

_SACCT = (
    *("JobID", "JobIDRaw", "JobName", "Partition", "State", "Reason", "ExitCode"),
    *("Submit", "Eligible", "Start", "End", "Timelimit", "NodeList"),
)
SACCT_FORMAT = ",".join(_SACCT)

_ALONE = ("Comment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "AdminComment", "SystemComment")
_SACCT_ROW = re.compile(r"\n(?=\d+(?:_\S+)?" + FIELD_END + ")")
_NAME = re.compile(r"(?P<ids>[^\n]*?) JobName=(?P<name>.*?)\n(?P<rest> +UserId=.*)", re.DOTALL)
_NODE_FIELD = re.compile(r"(?:^|\s)(NodeName|State|SlurmdStartTime)=(\S*)")
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
"""Parts of a node's state, joined by `+`, that mean that the node is gone or was abandoned."""
_NO_TASK = "4294967294"  # of an array without tasks left in the queue, up to SLURM 22.05


def squeue(answer: str) -> list[JobRecord]:
    """From `squeue --noheader --Format=SQUEUE_FORMAT`.

    Raises:
        SchedulerError: it can't be read.
    """
    rows = answer.split(f"{ROW_END}\n")
    if rows.pop().strip():
        raise _unreadable("squeue", answer)
    records = []
    for row in rows:
        values = row.split(FIELD_END)
        if len(values) != len(_SQUEUE):
            raise _unreadable("squeue", row)
        found = dict(zip(_SQUEUE, values, strict=True))
        records.append(
            JobRecord(
                job_id=found["JobArrayID"].strip(),
                number=fields.number(found["JobID"]),
                name=found["Name"].rstrip(),
                partition=found["Partition"].strip(),
                state=JobState.parse(found["State"]),
                reason=fields.text(found["Reason"]),
                restarts=fields.number(found["RestartCnt"]),
                exit_code=fields.exit_code(found["exit_code"]),
                submit_time=fields.moment(found["SubmitTime"]),
                eligible_time=fields.moment(found["EligibleTime"]),
                start_time=fields.moment(found["StartTime"]),
                end_time=fields.moment(found["EndTime"]),
                preempt_time=fields.moment(found["PreemptTime"]),
                time_limit_s=fields.duration_s(found["TimeLimit"]),
                nodes=fields.nodes(found["NodeList"]),
                batch_host=fields.text(found["BatchHost"]) or None,
                requeue=fields.number(found["Requeue"]) > 0,
            )
        )
    return records


def scontrol(answer: str) -> list[JobRecord]:
    """From `scontrol show job`, one block per job.

    Raises:
        SchedulerError: it can't be read.
    """
    return [_scontrol_block(block) for block in re.split(r"\n\n(?=JobId=)", answer) if block.strip()]


def sacct(answer: str) -> list[JobRecord]:
    """From `sacct --noheader --parsable2 --allocations --delimiter=FIELD_END --format=SACCT_FORMAT`.

    Raises:
        SchedulerError: it can't be read.
    """
    records = []
    for row in _SACCT_ROW.split(answer.removesuffix("\n")) if answer else ():
        values = row.split(FIELD_END)
        if len(values) != len(_SACCT):
            raise _unreadable("sacct", row)
        found = dict(zip(_SACCT, values, strict=True))
        records.append(
            JobRecord(
                job_id=found["JobID"],
                number=fields.number(found["JobIDRaw"]),
                name=found["JobName"],
                partition=found["Partition"],
                state=JobState.parse(found["State"]),
                reason=fields.text(found["Reason"]),
                exit_code=fields.exit_code(found["ExitCode"]),
                submit_time=fields.moment(found["Submit"]),
                eligible_time=fields.moment(found["Eligible"]),
                start_time=fields.moment(found["Start"]),
                end_time=fields.moment(found["End"]),
                time_limit_s=fields.duration_s(found["Timelimit"]),
                nodes=fields.nodes(found["NodeList"]),
            )
        )
    return records


def failed_nodes(answer: str, since: float) -> tuple[str, ...]:
    """The nodes that are down, or whose slurmd has started since a moment: those died and came back.

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


def _scontrol_block(block: str) -> JobRecord:
    found = _scontrol_fields(block)
    try:
        return JobRecord(
            job_id=_scontrol_id(found),
            number=fields.number(found["JobId"]),
            name=found["JobName"],
            partition=found["Partition"],
            state=JobState.parse(found["JobState"]),
            reason=fields.text(found["Reason"]),
            restarts=fields.number(found["Restarts"]),
            exit_code=fields.exit_code(found["ExitCode"]),
            submit_time=fields.moment(found["SubmitTime"]),
            eligible_time=fields.moment(found["EligibleTime"]),
            start_time=fields.moment(found["StartTime"]),
            end_time=fields.moment(found["EndTime"]),
            preempt_time=fields.moment(found.get("PreemptTime", "None")),
            time_limit_s=fields.duration_s(found["TimeLimit"]),
            nodes=fields.nodes(found.get("NodeList", "")),
            batch_host=fields.text(found.get("BatchHost", "")) or None,
            requeue=found["Requeue"] == "1",
            stdout_path=_scontrol_path(found.get("StdOut", "")),
        )
    except KeyError as error:
        raise SchedulerError(f"expected {error.args[0]} in scontrol's answer, found {block!r}") from None


def _scontrol_fields(block: str) -> dict[str, str]:
    """Fields by name; what a person wrote stands at a line's end, and can't pass for another field there."""
    parts = _NAME.fullmatch(block)
    if parts is None:
        raise _unreadable("scontrol", block)
    found = {"JobName": parts["name"]}
    for line in (parts["ids"], *parts["rest"].split("\n")):
        key, _, value = line.strip().partition("=")
        if key in _ALONE:
            found.setdefault(key, value)
            continue
        for token in line.split():
            key, _, value = token.partition("=")
            found.setdefault(key, value)
    return found


def _scontrol_id(found: dict[str, str]) -> str:
    array, task = found.get("ArrayJobId"), found.get("ArrayTaskId", "N/A")
    if array is None:
        return found["JobId"]
    if task in {_NO_TASK, "N/A"}:
        return array
    return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"


def _scontrol_path(value: str) -> str | None:
    """The path, unless it is that of array tasks that have none yet."""
    return None if _NO_TASK in value else fields.text(value) or None


def _unreadable(command: str, found: str) -> SchedulerError:
    return SchedulerError(f"expected {command} to answer as SLURM 20.11 or later does, found {found[:400]!r}")
