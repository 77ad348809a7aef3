"""The nodes: a shell on each one, which needs neither Python nor the shared folder, and what its answers mean."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.doctor.finding import Finding, Severity, exclude_alternative, exclude_remedy
from hpctrain.doctor.folder import DoctorJobRecord, NodeAnswer
from hpctrain.phrases import listed
from hpctrain.startup import __version__

PACKAGES = ("torch", "submitit", "hydra-core", "omegaconf", "numpy")
"""Packages whose versions are reported."""
MARK = "hpctrain-doctor"
"""First word of the lines that the script prints, between whatever a node's login scripts print."""
NO_PLUGIN = "--mpi=none"
"""The option with which srun loads no MPI plugin; hpctrain needs none."""
PRINT_VERSIONS = """\
import json, hpctrain, hpctrain.doctor.nodes as nodes
# an earlier hpctrain has no such function
print(json.dumps(getattr(nodes, "versions", lambda: dict(hpctrain=hpctrain.__version__))()))
"""
"""What each node's Python executes."""
SCRIPT = f"""\
say() {{ echo "{MARK} ${{SLURMD_NODENAME:-$(hostname)}} $*"; }}
say clock "$(date +%s.%N)"
say begin folder
if ! [ -d "$1" ]; then
    say folder missing
elif [ "$(cat "$1/token" 2>/dev/null)" != "$2" ]; then
    say folder other
elif ! problem=$( (echo "$2" >"$1/nodes/$SLURMD_NODENAME") 2>&1 ); then
    say folder refused "$problem"
else
    say folder shared
fi
say begin directory
[ . -ef "$4" ] || say directory "$(pwd -P)"
say begin python
if ! command -v "$3" >/dev/null 2>&1; then
    say python missing
elif ! found=$("$3" -c '{PRINT_VERSIONS}' 2>&1); then
    say python broken "$(echo "$found" | tail -n 1)"
else
    say python works "$(echo "$found" | grep '^{{' | tail -n 1)"
fi
say end
"""
"""Its arguments: the doctor's folder, the token in it, the ranks' Python, and where the command was typed."""
SKEW_S = 2.0
"""Seconds that clocks may differ before it is worth knowing."""
LARGE_SKEW_S = 60.0
"""Seconds from which deadlines are missed; SLURM itself refuses credentials that are five minutes old."""
DECIDE_TOGETHER = ("hpctrain", "torch", "python")
"""Packages whose versions should be the same everywhere; the first decides whether ranks understand each other."""
LOG_LINES = 5
"""Lines at the end of the batch script's log that a finding quotes."""
INSTALL = "install the environment on a file system that all nodes share, and submit from it"


def versions() -> dict[str, str]:
    """The versions of Python, hpctrain and its packages; empty for one that isn't installed. Nothing is imported."""
    installed = {"python": platform.python_version(), "hpctrain": __version__}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = ""
    return installed


def read_line(answers: dict[str, NodeAnswer], line: str, begun_at: float, now: float) -> None:
    """Take a line of the script's output.

    Args:
        answers: of the nodes; that of the line's node is replaced.
        line: any line of the step's output.
        begun_at: epoch seconds before the step began, on the batch host's clock.
        now: epoch seconds when the line arrived, on the same clock.
    """
    mark, _, text = line.strip().partition(" ")
    node, _, words = text.partition(" ")
    if mark != MARK or node not in answers:
        return
    key, _, text = words.partition(" ")
    result, _, detail = text.partition(" ")
    answer = answers[node]
    match key:
        case "clock":
            answer = replace(answer, clock_ahead_s=_clock_ahead_s(text, begun_at, now))
        case "begin":
            answer = replace(answer, begun=text)
        case "folder":
            answer = replace(answer, folder=result, folder_problem=detail)
        case "directory":
            answer = replace(answer, directory=text)
        case "python" if result == "works":
            answer = replace(answer, python=result, versions=_versions(detail))
        case "python":
            answer = replace(answer, python=result, python_problem=detail)
        case "end":
            answer = replace(answer, ended=True)
    answers[node] = answer


def _clock_ahead_s(text: str, begun_at: float, now: float) -> tuple[float, float] | None:
    try:
        there = float(text.rstrip("N").rstrip("."))  # some shells' date prints N itself
    except ValueError:
        return None
    # It was read between the two: bounds, so that a step that starts slowly is never taken for a wrong clock.
    return there - now, there - begun_at


def _versions(text: str) -> dict[str, str]:
    try:
        printed = json.loads(text)
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in printed.items()} if isinstance(printed, dict) else {}


def node_findings(job: DoctorJobRecord, *, folder: Path, python: str, versions: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on the answers of the nodes' shells.

    Args:
        job: the record of the job, after its first step.
        folder: the examination's, which stands for the run directories.
        python: the ranks'.
        versions: that all nodes should have.
    """
    if job.plugin_refused:
        yield Finding(
            check="mpi plugin",
            problem=f"srun can't load the MPI plugin that it takes by default: {job.plugin_refused}",
            why="no rank starts; hpctrain doesn't use MPI",
            remedy=f"set cluster.srun_args=[{NO_PLUGIN}]",
        )
    complaints = job.complaints.get("nodes", [])
    answers = [job.answers[node] for node in job.nodes if node in job.answers]
    if not any(answer.begun for answer in answers):
        late = "no node answered in time; " if "nodes" in job.late else ""
        yield Finding(
            check="srun",
            problem=f"srun starts nothing on the nodes: {late}{'; '.join(complaints) or 'srun printed nothing'}",
            why="no rank starts",
            remedy="try `srun --nodes=1 hostname` in an allocation of your own, and ask the cluster's administrators",
            nodes=tuple(job.nodes),
        )
        return
    yield from _silent_nodes(answers, complaints)
    yield from _unusable_folders(answers, folder)
    yield from _unusable_pythons(answers, python)
    yield from _other_versions(answers, versions)
    yield from _wrong_directories(answers)
    yield from _wrong_clocks(answers)


def _silent_nodes(answers: Sequence[NodeAnswer], complaints: Sequence[str]) -> Iterator[Finding]:
    for answer in answers:
        if answer.ended:
            continue
        name = re.compile(rf"\b{re.escape(answer.node)}:")
        lines = "; ".join(line for line in complaints if name.search(line))
        where = f"while it checked the {answer.begun}" if answer.begun else "before its first check"
        yield Finding(
            check="node",
            problem=f"{answer.node} stopped answering {where}{lines and f': {lines}'}",
            why="ranks on it would not start, and the others would wait for them",
            remedy=exclude_remedy([answer.node]),
            nodes=(answer.node,),
        )


def _unusable_folders(answers: Sequence[NodeAnswer], folder: Path) -> Iterator[Finding]:
    problems = {"missing": "isn't there", "other": "is another folder than that of the job's first node"}
    for state, problem in problems.items():
        if nodes := tuple(answer.node for answer in answers if answer.folder == state):
            yield Finding(
                check="folder",
                problem=f"{listed(nodes)}: {folder} {problem}",
                why="ranks read their configuration there, and write logs and checkpoints",
                remedy="put the run directory on a file system that all nodes share: set run_dir, or type the command "
                f"in a folder there{exclude_alternative(nodes)}",
                nodes=nodes,
            )
    for answer in answers:
        if answer.folder != "refused":
            continue
        message = answer.folder_problem.rpartition(": ")[2] or "refused"
        is_full = "No space left" in message or "quota" in message.lower()
        elsewhere = f"set run_dir to a folder that the nodes may write to{exclude_alternative([answer.node])}"
        yield Finding(
            check="room" if is_full else "folder",
            problem=f"{answer.node} can't write into {folder} ({message})",
            why="ranks write logs and checkpoints there",
            remedy="make room there, or set run_dir" if is_full else elsewhere,
            nodes=(answer.node,),
        )


def _unusable_pythons(answers: Sequence[NodeAnswer], python: str) -> Iterator[Finding]:
    if nodes := tuple(answer.node for answer in answers if answer.python == "missing"):
        yield Finding(
            check="python",
            problem=f"{listed(nodes)}: {python} isn't there",
            why="ranks can't start",
            remedy=INSTALL + exclude_alternative(nodes),
            nodes=nodes,
        )
    for answer in answers:
        if answer.python == "broken":
            yield Finding(
                check="python",
                problem=f"{answer.node}: {python} can't import hpctrain ({answer.python_problem})",
                why="ranks can't start",
                remedy=f"try `srun --nodelist={answer.node} {python} -m hpctrain --version`; modules that it needs are "
                "loaded in cluster.setup",
                nodes=(answer.node,),
            )


def _other_versions(answers: Sequence[NodeAnswer], versions: Mapping[str, str]) -> Iterator[Finding]:
    for name in DECIDE_TOGETHER:
        expected = versions.get(name, "")
        nodes_by_version: dict[str, list[str]] = {}
        for answer in answers:
            if answer.versions and answer.versions.get(name, "") != expected:
                nodes_by_version.setdefault(answer.versions.get(name) or "none", []).append(answer.node)
        for version, nodes in nodes_by_version.items():
            yield Finding(
                check="versions",
                severity=Severity.ERROR if name == "hpctrain" or version == "none" else Severity.WARNING,
                problem=f"{listed(nodes)}: {name} is {version}, expected {expected or 'none'}",
                why="ranks have to be the same program, and with another torch a run ends with other bits",
                remedy="give all nodes the same Python environment, on a file system that they share",
                nodes=tuple(nodes),
            )


def _wrong_directories(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    if directories := {answer.node: answer.directory for answer in answers if answer.directory}:
        first = next(iter(directories.values()))
        yield Finding(
            check="working directory",
            severity=Severity.WARNING,
            problem=f"{listed(directories)}: processes start in {first} instead of the folder where this was typed",
            why="relative paths of a task, and modules of your own, aren't found",
            remedy="type the command in a folder that all nodes share",
            nodes=tuple(directories),
        )


def _wrong_clocks(answers: Sequence[NodeAnswer]) -> Iterator[Finding]:
    off = {answer.node: ahead for answer in answers if abs(ahead := _ahead_s(answer)) >= SKEW_S}
    first = answers[0].node
    offsets = [ahead for node, ahead in off.items() if node != first]
    if len(offsets) > 1 and len(offsets) == len(answers) - 1 and len({ahead > 0 for ahead in offsets}) == 1:
        # all differ alike from the first node, with which they are compared
        off = {first: -min(offsets, key=abs)}
    for node, ahead in off.items():
        direction = "ahead of" if ahead > 0 else "behind"
        whose = "those of the others" if node == first else "that of the job's first node"
        yield Finding(
            check="clock",
            severity=Severity.ERROR if abs(ahead) >= LARGE_SKEW_S else Severity.WARNING,
            problem=f"{node}: its clock is at least {abs(ahead):.0f} s {direction} {whose}",
            why="deadlines are missed, files seem to come from the future, and SLURM refuses what is five minutes off",
            remedy=f"{exclude_remedy([node])}: its time synchronisation (chronyd, ntpd) doesn't work",
            nodes=(node,),
        )


def _ahead_s(answer: NodeAnswer) -> float:
    """Seconds by which a clock is ahead at least, negative if it is behind; 0 if it may be right."""
    if answer.clock_ahead_s is None:
        return 0.0
    low, high = answer.clock_ahead_s
    return low if low > 0 else min(high, 0.0)


def unanswered_job(state: str, stage: str) -> Finding:
    """The finding on a job that ended before it had answered.

    Args:
        state: in which it ended by SLURM's record; empty if SLURM has none.
        stage: what it was doing; empty if it never began.
    """
    moments = {"": "before it began", "nodes": "while the nodes were asked", "ranks": "while ranks measured"}
    return Finding(
        check="job",
        problem=f"the job ended{state and f' as {state}'} {moments[stage]}",
        why="what it would have found isn't known",
        remedy="type the command again; `scontrol show job` and `sacct` say more, and so does logs/ in its folder",
    )


def failed_script(host: str, logs: Path, lines: Sequence[str] | None, python: str) -> Finding:
    """The finding on a batch script that failed before it had written any answer.

    Args:
        host: its node.
        logs: the folder of its log.
        lines: of the log; None if there is no log.
        python: that executes its program.
    """
    if lines is None:
        return Finding(
            check="folder",
            problem=f"{host} couldn't write the log of the batch script into {logs}",
            why="a job whose batch script can't write its log fails without a message",
            remedy="put the run directory on a file system that all nodes share and may write to"
            f"{exclude_alternative([host])}",
            nodes=(host,),
        )
    lacks_python = any(python in line and "No such file" in line for line in lines)
    see_log = f"see the log in {logs}; a line of cluster.setup may have failed"
    return Finding(
        check="python" if lacks_python else "batch script",
        problem=f"the batch script failed on {host}: {'; '.join(lines[-LOG_LINES:]) or 'its log is empty'}",
        why="no rank starts",
        remedy=(INSTALL if lacks_python else see_log) + exclude_alternative([host]),
        nodes=(host,),
    )
