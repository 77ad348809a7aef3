"""What the answers of the nodes' shells mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.job_record import JobRecord
from hpctrain.doctor.nodes import NodeAnswer
from hpctrain.phrases import listed

SKEW_S = 2.0
"""Seconds that clocks may differ before it is worth knowing."""
LARGE_SKEW_S = 60.0
"""Seconds from which deadlines are missed; SLURM itself refuses credentials that are five minutes old."""
DECIDE_TOGETHER = ("hpctrain", "torch", "python")
"""Packages whose versions should be the same everywhere; the first decides whether ranks understand each other."""
LOG_LINES = 5
"""Lines at the end of the batch script's log that a finding quotes."""
INSTALL = "install the environment on a file system that all nodes share, and submit from it"
SHARED = (
    "put the run directory on a file system that all nodes share: set run_dir, or type the command in a folder there"
)


def node_findings(record: JobRecord, folder: str, python: str, submitted: Mapping[str, str]) -> list[Finding]:
    """Find out what is wrong with the nodes.

    Args:
        record: of the job, after its first step.
        folder: the examination's, which stands for the run directories.
        python: the ranks'.
        submitted: the versions where the command was typed.
    """
    found = [*_plugin(record)]
    answers = [record.answers[node] for node in record.nodes if node in record.answers]
    if not any(answer.begun for answer in answers):
        return [*found, _no_shell(record)]
    found += _silent(answers, record)
    by_folder: dict[str, list[NodeAnswer]] = {}
    for answer in answers:
        by_folder.setdefault(answer.folder, []).append(answer)
    found += _folder(by_folder, folder)
    found += _python(answers, python)
    found += _versions(answers, submitted)
    found += _directory(answers)
    found += _clocks(answers)
    return found


def job_finding(state: str, stage: str) -> Finding:
    """What it means that the job ended before it had answered.

    Args:
        state: in which SLURM says that it ended; empty if it doesn't know.
        stage: what it was doing; empty if it never began.
    """
    when = {"": "before it began", "nodes": "while the nodes were asked", "ranks": "while ranks measured"}[stage]
    return Finding(
        check="job",
        severity=Severity.ERROR,
        problem=f"the job ended{state and f' as {state}'} {when}",
        why="what it would have found isn't known",
        remedy="type the command again; `scontrol show job` and `sacct` say more, and so does logs/ in its folder",
    )


def never_started_finding(reason: str) -> Finding:
    """What it means that the job waits for something that no time changes; ``reason`` is an explanation."""
    return Finding(
        check="job",
        severity=Severity.ERROR,
        problem=f"the job will never start: {reason}",
        why="a run with the same request wouldn't either",
        remedy="change what it names; the job was cancelled",
    )


def batch_script_finding(host: str, logs: Path, lines: Sequence[str] | None, python: str) -> Finding:
    """What a batch script that failed without answers means: its node can't write its log, or can't start Python.

    Args:
        host: the script's node.
        logs: the folder of its log.
        lines: of the log; None if there is no log.
        python: that executes the script's program.
    """
    if lines is None:
        return Finding(
            check="folder",
            severity=Severity.ERROR,
            problem=f"{host} couldn't write the log of the batch script into {logs}",
            why="a job whose batch script can't write its log fails without a message",
            remedy=_leave_out((host,), "put the run directory on a file system that all nodes share and may write to"),
            nodes=(host,),
        )
    missing = any(python in line and "No such file" in line for line in lines)
    otherwise = INSTALL if missing else f"see the log in {logs}; a line of cluster.setup may have failed"
    return Finding(
        check="python" if missing else "batch script",
        severity=Severity.ERROR,
        problem=f"the batch script failed on {host}: {'; '.join(lines[-LOG_LINES:]) or 'its log is empty'}",
        why="no rank starts",
        remedy=_leave_out((host,), otherwise),
        nodes=(host,),
    )


def _plugin(record: JobRecord) -> Iterator[Finding]:
    if record.plugin_refused:
        yield Finding(
            check="mpi plugin",
            severity=Severity.ERROR,
            problem=f"srun can't load the MPI plugin that it takes by default: {record.plugin_refused}",
            why="no rank starts; hpctrain doesn't use MPI",
            remedy="set cluster.srun_args=[--mpi=none]",
        )


def _no_shell(record: JobRecord) -> Finding:
    said = "; ".join(record.complaints.get("nodes", [])) or "srun printed nothing"
    if "nodes" in record.late:
        said = f"no node answered in time; {said}"
    return Finding(
        check="srun",
        severity=Severity.ERROR,
        problem=f"srun starts nothing on the nodes: {said}",
        why="no rank starts",
        remedy="try `srun --nodes=1 hostname` in an allocation of your own, and ask the cluster's administrators",
        nodes=record.nodes,
    )


def _silent(answers: Sequence[NodeAnswer], record: JobRecord) -> Iterator[Finding]:
    for answer in answers:
        if answer.ended:
            continue
        named = re.compile(rf"\b{re.escape(answer.node)}:")
        said = [line for line in record.complaints.get("nodes", []) if named.search(line)]
        where = f"while it checked the {answer.begun}" if answer.begun else "before its first check"
        yield Finding(
            check="node",
            severity=Severity.ERROR,
            problem=f"{answer.node} stopped answering {where}{': ' if said else ''}{'; '.join(said)}",
            why="ranks on it would not start, and the others would wait for them",
            remedy=f"set cluster.exclude={answer.node}, and tell the cluster's administrators",
            nodes=(answer.node,),
        )


def _folder(by_folder: Mapping[str, Sequence[NodeAnswer]], folder: str) -> Iterator[Finding]:
    problems = {"missing": "isn't there", "other": "is another folder than that of the job's first node"}
    for kind, problem in problems.items():
        if nodes := _names(by_folder.get(kind, ())):
            yield Finding(
                check="folder",
                severity=Severity.ERROR,
                problem=f"{listed(nodes)}: {folder} {problem}",
                why="ranks read their configuration there, and write logs and checkpoints",
                remedy=_leave_out(nodes, SHARED),
                nodes=nodes,
            )
    for answer in by_folder.get("refused", ()):
        said = answer.folder_problem.rpartition(": ")[2] or "refused"
        full = "No space left" in said or "quota" in said.lower()
        yield Finding(
            check="room" if full else "folder",
            severity=Severity.ERROR,
            problem=f"{answer.node} can't write into {folder} ({said})",
            why="ranks write logs and checkpoints there",
            remedy="make room there, or set run_dir"
            if full
            else _leave_out((answer.node,), "set run_dir to a folder that the nodes may write to"),
            nodes=(answer.node,),
        )


def _leave_out(nodes: tuple[str, ...], otherwise: str) -> str:
    return f"{otherwise}; or leave {listed(nodes)} out: cluster.exclude={','.join(nodes)}" if nodes else otherwise


def _python(answers: Sequence[NodeAnswer], python: str) -> Iterator[Finding]:
    missing = _names(answer for answer in answers if answer.python == "missing")
    if missing:
        yield Finding(
            check="python",
            severity=Severity.ERROR,
            problem=f"{listed(missing)}: {python} isn't there",
            why="ranks can't start",
            remedy=_leave_out(missing, INSTALL),
            nodes=missing,
        )
    for answer in answers:
        if answer.python == "broken":
            yield Finding(
                check="python",
                severity=Severity.ERROR,
                problem=f"{answer.node}: {python} can't import hpctrain ({answer.python_problem})",
                why="ranks can't start",
                remedy=f"try `srun --nodelist={answer.node} {python} -m hpctrain --version`; modules that it needs are "
                "loaded in cluster.setup",
                nodes=(answer.node,),
            )


def _versions(answers: Sequence[NodeAnswer], submitted: Mapping[str, str]) -> Iterator[Finding]:
    for name in DECIDE_TOGETHER:
        others: dict[str, list[str]] = {}
        for answer in answers:
            if answer.versions and answer.versions.get(name, "") != submitted.get(name, ""):
                others.setdefault(answer.versions.get(name) or "none", []).append(answer.node)
        for version, nodes in others.items():
            yield Finding(
                check="versions",
                severity=Severity.ERROR if name == "hpctrain" or version == "none" else Severity.WARNING,
                problem=f"{listed(nodes)}: {name} is {version}, expected {submitted.get(name) or 'none'}",
                why="ranks have to be the same program, and with another torch a run ends with other bits",
                remedy="give all nodes the same Python environment, on a file system that they share",
                nodes=tuple(nodes),
            )


def _directory(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    nodes = _names(answer for answer in answers if answer.directory)
    if nodes:
        elsewhere = next(one.directory for one in answers if one.directory)
        yield Finding(
            check="working directory",
            severity=Severity.WARNING,
            problem=f"{listed(nodes)}: processes start in {elsewhere} instead of the folder where this was typed",
            why="relative paths of a task, and modules of your own, aren't found",
            remedy="type the command in a folder that all nodes share",
            nodes=nodes,
        )


def _clocks(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    off = {answer.node: ahead for answer in answers if abs(ahead := _ahead_s(answer)) >= SKEW_S}
    first = answers[0].node
    others = [ahead for node, ahead in off.items() if node != first]
    if len(others) > 1 and len(others) == len(answers) - 1 and len({ahead > 0 for ahead in others}) == 1:
        # all differ alike from the first node, with which they are compared
        off = {first: -min(others, key=abs)}
    for node, ahead in off.items():
        direction = "ahead of" if ahead > 0 else "behind"
        whose = "those of the others" if node == first else "that of the job's first node"
        yield Finding(
            check="clock",
            severity=Severity.ERROR if abs(ahead) >= LARGE_SKEW_S else Severity.WARNING,
            problem=f"{node}: its clock is at least {abs(ahead):.0f} s {direction} {whose}",
            why="deadlines are missed, files seem to come from the future, and SLURM refuses what is five minutes off",
            remedy=f"set cluster.exclude={node}, and tell the cluster's administrators: its time synchronisation "
            "(chronyd, ntpd) doesn't work",
            nodes=(node,),
        )


def _ahead_s(answer: NodeAnswer) -> float:
    """Seconds by which a clock is ahead at least, negative if it is behind; 0 if it may be right."""
    if answer.clock_ahead_s is None:
        return 0.0
    low, high = answer.clock_ahead_s
    return low if low > 0 else min(high, 0.0)


def _names(answers: Iterable[NodeAnswer]) -> tuple[str, ...]:
    return tuple(answer.node for answer in answers)
