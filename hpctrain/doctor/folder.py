"""The folder of one examination, which the job and the command share, and the records in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from hpctrain.files import write_json
from hpctrain.run.directory import PathIn, RunDirectory
from hpctrain.run.record_fields import (
    COUNT,
    FLAG,
    NAME,
    NUMBER,
    POSITIVE,
    TEXT,
    TEXT_BY_NAME,
    TEXTS,
    TEXTS_BY_NAME,
    FieldType,
    by_name,
    field_types,
    list_of,
    read_fields,
)

Record = TypeVar("Record")
GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "driver": "driver_version",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "temperature": "temperature.gpu",
    "hardware_slowdown": "clocks_throttle_reasons.hw_slowdown",
    "thermal_slowdown": "clocks_throttle_reasons.hw_thermal_slowdown",
    "power_brake": "clocks_throttle_reasons.hw_power_brake_slowdown",
}
"""Names in a GPU's record, and nvidia-smi's for them (`nvidia-smi --help-query-gpu`)."""
OWN_OPTIONS = frozenset({"slurm", "local"})
"""The options of `cluster` that are hpctrain's own."""


def is_name(text: str) -> bool:
    """Whether an option of `cluster` of the user's own may have this name."""
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", text) is not None and text not in OWN_OPTIONS


# a file of this name is written into conf/cluster
_OPTION = FieldType("the name of an option", lambda value: isinstance(value, str) and is_name(value))
_NAMES = FieldType("a list of names", lambda value: TEXTS.accepts(value) and all(map(NAME.accepts, value)))
_SPAN = FieldType(
    "two numbers", lambda value: isinstance(value, list) and len(value) == 2 and all(map(NUMBER.accepts, value))
)
_SHORT = FieldType("a short string", lambda value: isinstance(value, str) and len(value) <= 200)
_GPUS = list_of(dict.fromkeys(GPU_FIELDS, _SHORT), tuple(GPU_FIELDS))
_INTERFACES = list_of({"name": TEXT, "address": TEXT, "mbit_per_s": COUNT}, ("name", "address", "mbit_per_s"))


@dataclass(frozen=True, slots=True)
class DoctorFolder:
    """The paths of an examination; the folder isn't a run directory.

    Args:
        path: the folder, absolute.
    """

    path: Path

    request = PathIn("request.yaml")
    """The configuration, as a run would store it."""
    options = PathIn("asked.json")
    """The `DoctorOptions`."""
    token = PathIn("token")
    """A text by which nodes recognise the folder."""
    nodes = PathIn("nodes")
    """A file of each node that can write here."""
    job = PathIn("job.json")
    """The `DoctorJobRecord`, after each step."""
    ranks = PathIn("ranks")
    """A `RankRecord` of each rank."""
    measured = PathIn("measured.json")
    """Measurements that the ranks made together."""
    findings = PathIn("findings.json")
    """The result, as `doctor --json` prints it."""

    def rank(self, rank: int) -> Path:
        """The record of one rank."""
        return self.ranks / f"{rank}.json"

    @property
    def baseline(self) -> Path:
        """The first measurements, with which later examinations in the same folder are compared."""
        return self.path.parent / "baseline.json"

    @property
    def as_run(self) -> RunDirectory:
        """The same folder, for the parts of a launch that log and submit there."""
        return RunDirectory.at(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """The words and flags of the command, without the run's configuration.

    Attributes:
        typed: the words after `python -m hpctrain`.
        directory: where they were typed.
        site: the name of the site file; None for that of the cluster.
        renew: whether to replace the baseline.
    """

    typed: Annotated[Sequence[str], TEXTS] = ()
    directory: Annotated[str, TEXT] = ""
    site: Annotated[str | None, _OPTION] = None
    renew: Annotated[bool, FLAG] = False

    @property
    def has_site(self) -> bool:
        """Whether the command names an option of the user's own already, so that none has to be written."""
        options = [word.partition("=")[2] for word in self.typed if word.startswith("cluster=")]
        return self.site is None and bool(options) and options[-1] != "slurm"


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """Report of a node's shell.

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

    node: Annotated[str, NAME]
    clock_ahead_s: Annotated[Sequence[float] | None, _SPAN] = None
    folder: Annotated[str, TEXT] = ""
    folder_problem: Annotated[str, TEXT] = ""
    directory: Annotated[str, TEXT] = ""
    python: Annotated[str, TEXT] = ""
    python_problem: Annotated[str, TEXT] = ""
    versions: Annotated[Mapping[str, str], TEXT_BY_NAME] = field(default_factory=dict)
    begun: Annotated[str, TEXT] = ""
    ended: Annotated[bool, FLAG] = False

    @property
    def works(self) -> bool:
        """Whether ranks can start there."""
        return self.ended and self.folder == "shared" and self.python == "works"


_ANSWERS = by_name(field_types(NodeAnswer), ("node",))


@dataclass(frozen=True, slots=True)
class DoctorJobRecord:
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

    stage: Annotated[str, TEXT] = "nodes"
    nodes: Annotated[Sequence[str], _NAMES] = ()
    answers: Annotated[dict[str, NodeAnswer], _ANSWERS] = field(default_factory=dict)
    plugin_refused: Annotated[str, TEXT] = ""
    complaints: Annotated[dict[str, list[str]], TEXTS_BY_NAME] = field(default_factory=dict)
    rank_nodes: Annotated[Sequence[str], _NAMES] = ()
    late: Annotated[list[str], TEXTS] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Measurements that a rank made by itself, and the stage that it reached.

    Attributes:
        node: its name.
        stage: what it did last, as the end of "it stopped while ..."; `done` at the end.
        error: that ended it; empty without one.
        own_address: to which the node's own name resolves.
        smi_problem: why nvidia-smi fails; empty if it works, or isn't installed.
        met: whether the rank met the others.
        interfaces: of the node: name, address and speed.
        devices: of the rank.
        gpus: nvidia-smi's report of each GPU of the node, from its first rank.
        flops_per_s: of matrix multiplications; None if they weren't measured.
        write_bytes_per_s: to the file system of the runs, from the node's first rank.
    """

    node: Annotated[str, TEXT]
    stage: Annotated[str, TEXT]
    error: Annotated[str, TEXT] = ""
    own_address: Annotated[str, TEXT] = ""
    smi_problem: Annotated[str, TEXT] = ""
    met: Annotated[bool, FLAG] = False
    interfaces: Annotated[Sequence[Mapping[str, Any]], _INTERFACES] = ()
    devices: Annotated[Sequence[str], TEXTS] = ()
    gpus: Annotated[Sequence[Mapping[str, str]], _GPUS] = ()
    flops_per_s: Annotated[float | None, POSITIVE] = None
    write_bytes_per_s: Annotated[float | None, POSITIVE] = None

    @property
    def has_ended(self) -> bool:
        """Whether the rank measured everything, or failed."""
        return self.stage == "done" or bool(self.error)


def write_record(path: Path, record: DoctorOptions | DoctorJobRecord) -> None:
    """Store a record.

    Raises:
        OSError: the file system's error.
    """
    write_json(path, asdict(record))


def from_json(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """A record from its stored values, of which null stands for one that is missing."""
    types = field_types(kind)  # type: ignore[arg-type]  # every class is hashable
    return kind(**{name: values[name] for name in types if values.get(name) is not None})


def read_options(folder: DoctorFolder) -> DoctorOptions:
    """The options of an earlier command.

    Raises:
        RunDirectoryError: a field of the record has the wrong type.
    """
    return from_json(DoctorOptions, read_fields(folder.options, field_types(DoctorOptions)))


def read_job(folder: DoctorFolder) -> DoctorJobRecord | None:
    """The record of the job; None as long as there is none.

    Raises:
        RunDirectoryError: a field of the record has the wrong type.
    """
    if not (values := read_fields(folder.job, field_types(DoctorJobRecord))):
        return None
    answers = {node: from_json(NodeAnswer, answer) for node, answer in (values.get("answers") or {}).items()}
    return from_json(DoctorJobRecord, {**values, "answers": answers})


def read_rank(folder: DoctorFolder, rank: int) -> RankRecord | None:
    """The record of a rank; None if it left none.

    Raises:
        RunDirectoryError: a field of the record has the wrong type.
    """
    values = read_fields(folder.rank(rank), field_types(RankRecord), ("node", "stage"))
    return from_json(RankRecord, values) if values else None
