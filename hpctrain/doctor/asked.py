"""What the user asked for, beside the run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hpctrain.doctor.folder import DoctorFolder
from hpctrain.doctor.site_file import is_name
from hpctrain.files import write_json
from hpctrain.run.record_fields import FLAG, TEXT, TEXTS, FieldType, read_fields

_FIELD_TYPES = {
    "typed": TEXTS,
    "directory": TEXT,
    # a file of this name is written into conf/cluster
    "site": FieldType("the name of an option", lambda value: isinstance(value, str) and is_name(value)),
    "renew": FLAG,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The words and flags of the command.

    Attributes:
        typed: the words after `python -m hpctrain`.
        directory: where they were typed.
        site: the name of the site file; None for that of the cluster.
        renew: whether to replace the baseline.
    """

    typed: Sequence[str]
    directory: str
    site: str | None = None
    renew: bool = False

    @property
    def has_site(self) -> bool:
        """Whether the command names an option of the user's own already, so that none has to be written."""
        options = [word.partition("=")[2] for word in self.typed if word.startswith("cluster=")]
        return self.site is None and bool(options) and options[-1] != "slurm"

    def write(self, folder: DoctorFolder) -> None:
        """Store it in the folder of the examination.

        Raises:
            OSError: the file system's error.
        """
        write_json(folder.asked, asdict(self))

    @classmethod
    def read(cls, folder: DoctorFolder) -> Asked:
        """What an earlier command asked for.

        Raises:
            RunDirectoryError: a field of the record has the wrong type.
        """
        found = read_fields(folder.asked, _FIELD_TYPES)
        return cls(
            typed=list(found.get("typed") or ()),
            directory=found.get("directory") or "",
            site=found.get("site"),
            renew=bool(found.get("renew")),
        )
