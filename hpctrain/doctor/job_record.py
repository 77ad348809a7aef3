"""What the doctor's batch script leaves for the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.doctor.folder import DoctorFolder
from hpctrain.doctor.nodes import FIELD_TYPES as OF_A_NODE
from hpctrain.doctor.nodes import NodeAnswer
from hpctrain.files import write_json
from hpctrain.run.record_fields import NAME, TEXT, TEXTS, TEXTS_BY_NAME, FieldType, by_name, read_fields

_NAMES = FieldType("a list of names", lambda value: TEXTS.accepts(value) and all(map(NAME.accepts, value)))
_FIELD_TYPES = {
    "stage": TEXT,
    "nodes": _NAMES,
    "answers": by_name(OF_A_NODE, ("node",)),
    "plugin_refused": TEXT,
    "complaints": TEXTS_BY_NAME,
    "rank_nodes": _NAMES,
    "late": TEXTS,
}


@dataclass(slots=True)
class JobRecord:
    """The progress and the answers of the job.

    Attributes:
        stage: `nodes`, `ranks` or `done`.
        nodes: of the job, in SLURM's order.
        answers: of the nodes' shells.
        plugin_refused: srun's message if it can't start a step with its default MPI plugin, but can without one.
        complaints: srun's messages, by stage.
        rank_nodes: the nodes on which ranks were started.
        late: the stages that took too long and were ended.
    """

    stage: str = "nodes"
    nodes: tuple[str, ...] = ()
    answers: dict[str, NodeAnswer] = field(default_factory=dict)
    plugin_refused: str = ""
    complaints: dict[str, list[str]] = field(default_factory=dict)
    rank_nodes: tuple[str, ...] = ()
    late: list[str] = field(default_factory=list)

    def write(self, folder: DoctorFolder) -> None:
        """Store it.

        Raises:
            OSError: the file system's error.
        """
        answers = {node: answer.as_record() for node, answer in self.answers.items()}
        names = ("stage", "nodes", "plugin_refused", "complaints", "rank_nodes", "late")
        write_json(folder.job, {**{name: getattr(self, name) for name in names}, "answers": answers})

    @classmethod
    def read(cls, folder: DoctorFolder) -> JobRecord | None:
        """The stored record; None as long as there is none.

        Raises:
            RunDirectoryError: a field of the record has the wrong type.
        """
        found = read_fields(folder.job, _FIELD_TYPES)
        return cls.from_record(found) if found else None

    @classmethod
    def from_record(cls, found: Mapping[str, Any]) -> JobRecord:
        """Make one from JSON."""
        found = {name: value for name, value in found.items() if value is not None}
        answers = {node: NodeAnswer.from_record(record) for node, record in found.get("answers", {}).items()}
        return cls(
            stage=str(found.get("stage", "nodes")),
            nodes=tuple(found.get("nodes", ())),
            answers=answers,
            plugin_refused=str(found.get("plugin_refused", "")),
            complaints=dict(found.get("complaints", {})),
            rank_nodes=tuple(found.get("rank_nodes", ())),
            late=list(found.get("late", ())),
        )
