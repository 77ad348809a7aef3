"""The nodes: a shell on each one, which needs neither Python nor the shared folder, and what its answers mean."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.doctor.finding import EXCLUDE, OR_EXCLUDE, Case, Check, Severity, when
from hpctrain.doctor.folder import DoctorJobRecord, NodeAnswer
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
    mark, _, rest = line.strip().partition(" ")
    node, _, words = rest.partition(" ")
    if mark != MARK or node not in answers:
        return
    key, _, rest = words.partition(" ")
    result, _, detail = rest.partition(" ")
    answer = answers[node]
    match key:
        case "clock":
            answer = replace(answer, clock_ahead_s=_clock_ahead_s(rest, begun_at, now))
        case "begin":
            answer = replace(answer, begun=rest)
        case "folder":
            answer = replace(answer, folder=result, folder_problem=detail)
        case "directory":
            answer = replace(answer, directory=rest)
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
    # it was read between the two
    return there - now, there - begun_at


def _versions(text: str) -> dict[str, str]:
    try:
        printed = json.loads(text)
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in printed.items()} if isinstance(printed, dict) else {}


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """What the nodes of a job reported, and what was expected.

    Attributes:
        job: the record of the job, after its first step.
        folder: the examination's, which stands for the run directories.
        python: the ranks'.
        versions: that all nodes should have.
    """

    job: DoctorJobRecord
    folder: str
    python: str
    versions: Mapping[str, str]

    @property
    def answers(self) -> list[NodeAnswer]:
        """The answers in SLURM's order; empty if no shell began."""
        answers = [self.job.answers[node] for node in self.job.nodes if node in self.job.answers]
        return answers if any(answer.begun for answer in answers) else []


def _no_shell(nodes: NodeAnswers) -> list[Case]:
    message = "; ".join(nodes.job.complaints.get("nodes", [])) or "srun printed nothing"
    if "nodes" in nodes.job.late:
        message = f"no node answered in time; {message}"
    return when(not nodes.answers, message=message, nodes=nodes.job.nodes)


def _silent(nodes: NodeAnswers) -> Iterator[Case]:
    for answer in nodes.answers:
        name = re.compile(rf"\b{re.escape(answer.node)}:")
        lines = [line for line in nodes.job.complaints.get("nodes", []) if name.search(line)]
        where = f"while it checked the {answer.begun}" if answer.begun else "before its first check"
        message = f"{where}: {'; '.join(lines)}" if lines else where
        yield from when(not answer.ended, message=message, nodes=[answer.node])


def _not_shared(nodes: NodeAnswers) -> Iterator[Case]:
    problems = {"missing": "isn't there", "other": "is another folder than that of the job's first node"}
    for folder, problem in problems.items():
        names = [answer.node for answer in nodes.answers if answer.folder == folder]
        yield from when(names, problem=problem, nodes=names)


def _refused(nodes: NodeAnswers, *, full: bool) -> Iterator[Case]:
    for answer in nodes.answers:
        message = answer.folder_problem.rpartition(": ")[2] or "refused"
        is_full = "No space left" in message or "quota" in message.lower()
        yield from when(answer.folder == "refused" and is_full is full, message=message, nodes=[answer.node])


def _with_python(nodes: NodeAnswers, state: str) -> dict[str, str]:
    """The nodes on which the ranks' Python is in a state, and the last line that it printed."""
    return {answer.node: answer.python_problem for answer in nodes.answers if answer.python == state}


def _other_versions(nodes: NodeAnswers) -> Iterator[Case]:
    for name in DECIDE_TOGETHER:
        others: dict[str, list[str]] = {}
        for answer in nodes.answers:
            if answer.versions and answer.versions.get(name, "") != nodes.versions.get(name, ""):
                others.setdefault(answer.versions.get(name) or "none", []).append(answer.node)
        for version, names in others.items():
            severity = Severity.ERROR if name == "hpctrain" or version == "none" else Severity.WARNING
            expected = nodes.versions.get(name) or "none"
            yield {"name": name, "version": version, "expected": expected, "severity": severity, "nodes": names}


def _elsewhere(nodes: NodeAnswers) -> list[Case]:
    others = {answer.node: answer.directory for answer in nodes.answers if answer.directory}
    return when(others, directory=next(iter(others.values()), ""), nodes=others)


def _clocks(nodes: NodeAnswers) -> Iterator[Case]:
    answers = nodes.answers
    off = {answer.node: ahead for answer in answers if abs(ahead := _ahead_s(answer)) >= SKEW_S}
    first = answers[0].node if answers else ""
    others = [ahead for node, ahead in off.items() if node != first]
    if len(others) > 1 and len(others) == len(answers) - 1 and len({ahead > 0 for ahead in others}) == 1:
        # all differ alike from the first node, with which they are compared
        off = {first: -min(others, key=abs)}
    for node, ahead in off.items():
        yield {
            "seconds": abs(ahead),
            "direction": "ahead of" if ahead > 0 else "behind",
            "whose": "those of the others" if node == first else "that of the job's first node",
            "severity": Severity.ERROR if abs(ahead) >= LARGE_SKEW_S else Severity.WARNING,
            "nodes": [node],
        }


def _ahead_s(answer: NodeAnswer) -> float:
    """Seconds by which a clock is ahead at least, negative if it is behind; 0 if it may be right."""
    if answer.clock_ahead_s is None:
        return 0.0
    low, high = answer.clock_ahead_s
    return low if low > 0 else min(high, 0.0)


INSTALL = "install the environment on a file system that all nodes share, and submit from it"
SHARED = (
    "put the run directory on a file system that all nodes share: set run_dir, or type the command in a folder there"
)
NODE_CHECKS: tuple[Check[NodeAnswers], ...] = (
    Check(
        "mpi plugin",
        Severity.ERROR,
        lambda nodes: when(nodes.job.plugin_refused),
        problem="srun can't load the MPI plugin that it takes by default: {measured.job.plugin_refused}",
        why="no rank starts; hpctrain doesn't use MPI",
        remedy=f"set cluster.srun_args=[{NO_PLUGIN}]",
    ),
    Check(
        "srun",
        Severity.ERROR,
        _no_shell,
        problem="srun starts nothing on the nodes: {message}",
        why="no rank starts",
        remedy="try `srun --nodes=1 hostname` in an allocation of your own, and ask the cluster's administrators",
    ),
    Check(
        "node",
        Severity.ERROR,
        _silent,
        problem="{nodes} stopped answering {message}",
        why="ranks on it would not start, and the others would wait for them",
        remedy=EXCLUDE,
    ),
    Check(
        "folder",
        Severity.ERROR,
        _not_shared,
        problem="{nodes}: {measured.folder} {problem}",
        why="ranks read their configuration there, and write logs and checkpoints",
        remedy=SHARED + OR_EXCLUDE,
    ),
    Check(
        "room",
        Severity.ERROR,
        lambda nodes: _refused(nodes, full=True),
        problem="{nodes} can't write into {measured.folder} ({message})",
        why="ranks write logs and checkpoints there",
        remedy="make room there, or set run_dir",
    ),
    Check(
        "folder",
        Severity.ERROR,
        lambda nodes: _refused(nodes, full=False),
        problem="{nodes} can't write into {measured.folder} ({message})",
        why="ranks write logs and checkpoints there",
        remedy=f"set run_dir to a folder that the nodes may write to{OR_EXCLUDE}",
    ),
    Check(
        "python",
        Severity.ERROR,
        lambda nodes: when(names := _with_python(nodes, "missing"), nodes=names),
        problem="{nodes}: {measured.python} isn't there",
        why="ranks can't start",
        remedy=INSTALL + OR_EXCLUDE,
    ),
    Check(
        "python",
        Severity.ERROR,
        lambda nodes: [{"message": text, "nodes": [node]} for node, text in _with_python(nodes, "broken").items()],
        problem="{nodes}: {measured.python} can't import hpctrain ({message})",
        why="ranks can't start",
        remedy="try `srun --nodelist={nodes} {measured.python} -m hpctrain --version`; modules that it needs are "
        "loaded in cluster.setup",
    ),
    Check(
        "versions",
        Severity.WARNING,
        _other_versions,
        problem="{nodes}: {name} is {version}, expected {expected}",
        why="ranks have to be the same program, and with another torch a run ends with other bits",
        remedy="give all nodes the same Python environment, on a file system that they share",
    ),
    Check(
        "working directory",
        Severity.WARNING,
        _elsewhere,
        problem="{nodes}: processes start in {directory} instead of the folder where this was typed",
        why="relative paths of a task, and modules of your own, aren't found",
        remedy="type the command in a folder that all nodes share",
    ),
    Check(
        "clock",
        Severity.WARNING,
        _clocks,
        problem="{nodes}: its clock is at least {seconds:.0f} s {direction} {whose}",
        why="deadlines are missed, files seem to come from the future, and SLURM refuses what is five minutes off",
        remedy=f"{EXCLUDE}: its time synchronisation (chronyd, ntpd) doesn't work",
    ),
)
"""What the answers of the nodes' shells mean."""


@dataclass(frozen=True, slots=True)
class UnansweredJob:
    """A job that ended, or will never start, before it had answered.

    Attributes:
        state: in which SLURM says that it ended; empty if it doesn't know.
        stage: what it was doing; empty if it never began.
        never: why it will never start; empty if it began or may have.
        host: the node of a batch script that failed; empty if it didn't.
        logs: the folder of the script's log.
        lines: of the log; None if there is no log.
        python: that executes the script's program.
    """

    state: str = ""
    stage: str = ""
    never: str = ""
    host: str = ""
    logs: Path = Path()
    lines: Sequence[str] | None = None
    python: str = ""

    def script_failed(self, *, without_python: bool) -> list[Case]:
        """The case of a batch script that failed and has a log, with or without its Python."""
        lines = self.lines or ()
        missing = any(self.python in line and "No such file" in line for line in lines)
        message = "; ".join(lines[-LOG_LINES:]) or "its log is empty"
        failed = self.host and self.lines is not None and missing is without_python
        return when(failed, message=message, nodes=[self.host])


_WHEN = {"": "before it began", "nodes": "while the nodes were asked", "ranks": "while ranks measured"}
JOB_CHECKS: tuple[Check[UnansweredJob], ...] = (
    Check(
        "job",
        Severity.ERROR,
        lambda job: when(job.never),
        problem="the job will never start: {measured.never}",
        why="a run with the same request wouldn't either",
        remedy="change what it names; the job was cancelled",
    ),
    Check(
        "job",
        Severity.ERROR,
        lambda job: when(not job.never and not job.host, state=job.state and f" as {job.state}", when=_WHEN[job.stage]),
        problem="the job ended{state} {when}",
        why="what it would have found isn't known",
        remedy="type the command again; `scontrol show job` and `sacct` say more, and so does logs/ in its folder",
    ),
    Check(
        "folder",
        Severity.ERROR,
        lambda job: when(job.host and job.lines is None, nodes=[job.host]),
        problem="{nodes} couldn't write the log of the batch script into {measured.logs}",
        why="a job whose batch script can't write its log fails without a message",
        remedy=f"put the run directory on a file system that all nodes share and may write to{OR_EXCLUDE}",
    ),
    Check(
        "python",
        Severity.ERROR,
        lambda job: job.script_failed(without_python=True),
        problem="the batch script failed on {nodes}: {message}",
        why="no rank starts",
        remedy=INSTALL + OR_EXCLUDE,
    ),
    Check(
        "batch script",
        Severity.ERROR,
        lambda job: job.script_failed(without_python=False),
        problem="the batch script failed on {nodes}: {message}",
        why="no rank starts",
        remedy=f"see the log in {{measured.logs}}; a line of cluster.setup may have failed{OR_EXCLUDE}",
    ),
)
"""What it means that the job left no answers."""
