"""What the answers of the nodes' shells mean."""

from __future__ import annotations

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


def batch_script_finding(host: str | None, state: str, logs: Path, lines: Sequence[str], python: str) -> Finding:
    """What a batch script that left no answers means: its node can't write its log, or can't start Python.

    Args:
        host: the script's node; None if it never began, or SLURM no longer knows it.
        state: in which the job ended; empty if SLURM no longer knows it.
        logs: the folder of its log.
        lines: of the log.
        python: that executes the supervisor.
    """
    where = host or "the job's first node"
    nodes = (host,) if host else ()
    otherwise = "put the run directory on a file system that all nodes share and may write to"
    if host is None and not lines:
        return Finding(
            check="job",
            severity=Severity.ERROR,
            problem=f"the job ended{state and f' as {state}'} before it began",
            why="the nodes weren't examined",
            remedy="type the command again; `sacct` or `scontrol show job` may know why",
        )
    if not lines:
        return Finding(
            check="folder",
            severity=Severity.ERROR,
            problem=f"{where} couldn't write the log of the batch script into {logs}",
            why="a job whose batch script can't write its log fails without a word",
            remedy=_leave_out(nodes, otherwise),
            nodes=nodes,
        )
    missing = any(python in line and "No such file" in line for line in lines)
    otherwise = INSTALL if missing else f"see the log in {logs}; a line of cluster.setup may have failed"
    return Finding(
        check="python" if missing else "batch script",
        severity=Severity.ERROR,
        problem=f"the batch script ended{state and f' as {state}'} on {where}: {'; '.join(lines[-LOG_LINES:])}",
        why="no rank starts",
        remedy=_leave_out(nodes, otherwise),
        nodes=nodes,
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
        said = [line for line in record.complaints.get("nodes", []) if f"{answer.node}:" in line]
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
                problem=f"{listed(nodes)}: {name} is {version}, but {submitted.get(name) or 'none'} here",
                why="ranks have to be the same program, and with another torch a run ends with other bits",
                remedy=f"install {name} {submitted.get(name) or version} in the Python of the ranks",
                nodes=tuple(nodes),
            )


def _directory(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    nodes = _names(answer for answer in answers if answer.directory)
    if nodes:
        elsewhere = next(one.directory for one in answers if one.directory)
        yield Finding(
            check="working directory",
            severity=Severity.WARNING,
            problem=f"{listed(nodes)}: the folder where this was typed isn't there; processes start in {elsewhere}",
            why="relative paths of a task, and modules of your own, aren't found",
            remedy="type the command in a folder that all nodes share",
            nodes=nodes,
        )


def _clocks(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    for answer in answers:
        if answer.clock_ahead_s is None:
            continue
        low, high = answer.clock_ahead_s
        # zero is between the bounds of a right clock
        off = low if low > 0 else -high if high < 0 else 0.0
        if off < SKEW_S:
            continue
        direction = "ahead of" if low > 0 else "behind"
        yield Finding(
            check="clock",
            severity=Severity.ERROR if off >= LARGE_SKEW_S else Severity.WARNING,
            problem=f"{answer.node}: its clock is at least {off:.0f} s {direction} that of the job's first node",
            why="deadlines are missed, files seem to come from the future, and SLURM refuses what is five minutes off",
            remedy=f"set cluster.exclude={answer.node}, and tell the cluster's administrators: nothing sets that clock",
            nodes=(answer.node,),
        )


def _names(answers: Iterable[NodeAnswer]) -> tuple[str, ...]:
    return tuple(answer.node for answer in answers)
