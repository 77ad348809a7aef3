"""The Python of the ranks: another version than its launcher's, or one that can't run them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from hpctrain.files import read_bytes
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import read_exit_records
from hpctrain.run.ledger import Attempt
from hpctrain.startup import __version__

EXITED = re.compile(r"(?P<node>\S+): tasks? (?P<rank>\d+)[\d,-]*: Exited with exit code (?P<code>\d+)")
"""What srun prints about ranks of a node that exited by themselves."""
NOT_STARTED = (126, 127)
"""Exit codes of env(1), which can't execute a program, and of a Python whose shared libraries are missing."""
NO_MODULE = re.compile(r"No module named '?(?P<module>\w+)")
NO_CONTAINER = re.compile(r"^(ch-run\[\d+\]: error: |FATAL: +|(slurmstepd\S*: )?(error: )?pyxis: )|\brunc run failed\b")
"""What Charliecloud, Apptainer, Pyxis and runc print if they can't start a container."""
TOO_OLD = re.compile(r"[Uu]nknown option:? -P")
"""What Python prints that is older than 3.11."""
LAST_BYTES = 2_000
LAST_LINES = 4
"""Lines at the end of a rank's log that may say why it didn't begin: the usage of an old Python follows its error."""


def other_version(expected: str, version: str = __version__, python: str = sys.executable) -> str:
    """Describe a rank whose hpctrain has another version than its launcher's; empty if there is nothing to refuse.

    Both write into the run directory, whose formats may differ between versions.

    Args:
        expected: the launcher's version; empty if it isn't known.
        version: the rank's.
        python: the rank's.
    """
    if expected in ("", version):
        return ""
    return (
        f"the ranks' Python, {python}, has hpctrain {version}, and the run was submitted with hpctrain {expected}; "
        "install the same version there, or set cluster.python to a Python that has it"
    )


def other_torch(version: str, attempts: Sequence[Attempt], submitter: str | None) -> str:
    """Describe a torch of another version than before, with which the weights may differ in their last bits.

    Args:
        version: the version that trains this attempt.
        attempts: the earlier ones.
        submitter: the version that the Python had which submitted the run; None if it had no torch.

    Returns:
        One line; empty if the version is the same, or no other is known.
    """
    before = next((attempt for attempt in reversed(attempts) if attempt.torch is not None), None)
    expected = submitter if before is None else before.torch
    if expected in (None, version):
        return ""
    who = "the Python that submitted the run has" if before is None else f"attempt {before.attempt} had"
    return (
        f"this attempt has torch {version}, and {who} torch {expected}: the weights may differ from those of a run "
        f"with one version; to keep them equal bit for bit, set cluster.python to a Python with torch {expected}"
    )


def unable_python(directory: RunDirectory, attempt: int, complaints: Sequence[str], python: str) -> str:
    """Find out whether a rank exited because its Python can't run it: it isn't there, is too old, or has no hpctrain.

    The same would happen in the next attempt.

    Args:
        directory: the run.
        attempt: the attempt's number.
        complaints: srun's messages about its tasks; of each node that it names, the first rank is looked at.
        python: of the ranks, as the run names it.

    Returns:
        What the Python lacks, and what to do; empty if no rank has failed like that.
    """
    records = read_exit_records(directory.attempt(attempt))
    for exited in filter(None, map(EXITED.match, complaints)):
        rank = int(exited["rank"])
        if rank not in records and (why := explain_exit(int(exited["code"]), _last_lines(directory, rank))):
            return f"the ranks' Python on {exited['node']}, {python}, {why}"
    return ""


def explain_exit(code: int, lines: Sequence[str]) -> str:
    """Explain the exit of a process that should have become a rank; empty if its Python isn't the cause.

    Args:
        code: its exit code.
        lines: the last lines of its log.
    """
    text = "\n".join(lines)
    if lines and NO_CONTAINER.search(lines[-1]):
        return f"can't be started in its container ({lines[-1]}); correct cluster.container"
    if code in NOT_STARTED:
        what = f"can't be started ({lines[-1]})" if lines else "can't be started"
        remedy = "set cluster.python to one that all nodes have, or load its module in cluster.setup"
        return f"{what}; {remedy}; cluster.exclude leaves a broken node out"
    if TOO_OLD.search(text):
        return "is older than 3.11; set cluster.python to a newer one, or load its module in cluster.setup"
    if lines and (match := NO_MODULE.search(lines[-1])) is not None:
        has = f"has no module {match['module']}"
        return f"{has}; install hpctrain {__version__} for it, or set cluster.python to a Python that has it"
    return ""


def _last_lines(directory: RunDirectory, rank: int) -> list[str]:
    try:
        text = read_bytes(directory.rank_log(rank), last_bytes=LAST_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-LAST_LINES:]
