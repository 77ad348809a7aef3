"""The first step of the doctor's job: a shell on each node, which needs neither Python nor the shared folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.run.record_fields import FLAG, NAME, NUMBER, TEXT, TEXT_BY_NAME, FieldType

MARK = "hpctrain-doctor"
"""First word of the lines that the script prints, between whatever a node's login scripts print."""
NO_PLUGIN = "--mpi=none"
"""The option with which srun loads no MPI plugin; hpctrain needs none."""
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
elif ! found=$("$3" -m hpctrain.doctor.versions 2>&1); then
    say python broken "$(echo "$found" | tail -n 1)"
else
    say python works "$(echo "$found" | grep '^{{' | tail -n 1)"
fi
say end
"""
"""Its arguments: the doctor's folder, the token in it, the ranks' Python, and where the command was typed."""


_SPAN = FieldType(
    "two numbers", lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(NUMBER.accepts, value))
)
FIELD_TYPES = {
    **dict.fromkeys(("folder", "folder_problem", "directory", "python", "python_problem", "begun"), TEXT),
    "node": NAME,
    "clock_ahead_s": _SPAN,
    "versions": TEXT_BY_NAME,
    "ended": FLAG,
}
"""Of a `NodeAnswer` in JSON."""


@dataclass(slots=True)
class NodeAnswer:
    """What a node's shell reported.

    Attributes:
        node: its name.
        clock_ahead_s: bounds on how far its clock is ahead of the batch host's: lowest and highest; None if unknown.
        folder: `shared`, `missing`, `other` (a folder of that name with another content), `refused`, or empty.
        folder_problem: the shell's message if a file can't be written.
        directory: where its shell ran, if that isn't where the command was typed.
        python: `works`, `missing`, `broken`, or empty.
        python_problem: the last line that it printed, if it is broken.
        versions: of Python and the packages.
        begun: the last check that began.
        ended: whether the script reached its end.
    """

    node: str
    clock_ahead_s: tuple[float, float] | None = None
    folder: str = ""
    folder_problem: str = ""
    directory: str = ""
    python: str = ""
    python_problem: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    begun: str = ""
    ended: bool = False

    @property
    def works(self) -> bool:
        """Whether ranks can start there."""
        return self.ended and self.folder == "shared" and self.python == "works"

    def read(self, words: str, begun_at: float, now: float) -> None:
        """Take a line of the script.

        Args:
            words: after the node's name.
            begun_at: epoch seconds before the step began, on the batch host's clock.
            now: epoch seconds when the line arrived, on the same clock.
        """
        key, _, rest = words.partition(" ")
        what, _, detail = rest.partition(" ")
        match key:
            case "clock":
                self._read_clock(rest, begun_at, now)
            case "begin":
                self.begun = rest
            case "folder":
                self.folder, self.folder_problem = what, detail
            case "directory":
                self.directory = rest
            case "python":
                self.python = what
                if what == "works":
                    self.versions = _versions(detail)
                else:
                    self.python_problem = detail
            case "end":
                self.ended = True

    def _read_clock(self, text: str, begun_at: float, now: float) -> None:
        try:
            there = float(text.rstrip("N").rstrip("."))  # some shells' date prints N itself
        except ValueError:
            return
        # it was read between the two
        self.clock_ahead_s = (there - now, there - begun_at)

    def as_record(self) -> dict[str, Any]:
        """The answer for JSON."""
        names = (*self.__dataclass_fields__,)
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> NodeAnswer:
        """The answer of a record."""
        known = {name: record[name] for name in cls.__dataclass_fields__ if record.get(name) is not None}
        clock = known.get("clock_ahead_s")
        return cls(**known | {"clock_ahead_s": None if clock is None else (float(clock[0]), float(clock[1]))})


class NodeAnswers:
    """Collects the lines of all nodes.

    Args:
        nodes: of the job.
        begun_at: epoch seconds before the step began.
    """

    def __init__(self, nodes: Iterable[str], begun_at: float) -> None:
        self._begun_at = begun_at
        self.by_node = {node: NodeAnswer(node) for node in nodes}

    def read(self, line: str, now: float) -> None:
        """Take a line of the step's output, which arrived at ``now`` in epoch seconds."""
        mark, _, rest = line.strip().partition(" ")
        node, _, words = rest.partition(" ")
        if mark == MARK and node in self.by_node:
            self.by_node[node].read(words, self._begun_at, now)

    @property
    def are_complete(self) -> bool:
        """Whether all nodes have answered."""
        return all(answer.ended for answer in self.by_node.values())


def _versions(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}
