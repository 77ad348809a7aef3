"""The record that the ranks of a program haven't connected to each other."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.files import read_json_or_empty, write_json
from hpctrain.phrases import numbered
from hpctrain.run.record_fields import RANKS, TEXT, describe_wrong_field

FILE_NAME = "unconnected_ranks.json"
_FIELD_TYPES = {"count": RANKS, "unit": TEXT, "framework": TEXT}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnconnectedRanks:
    """Record, in an attempt's claim, that each rank of a program may be training its own model.

    Attributes:
        count: how many ranks there are, or nodes if the program starts the ranks of each node itself.
        unit: `rank` or `node`.
        framework: a launcher such as `torchrun` that the program starts, or `Lightning`, if its script imports it;
            otherwise empty.
    """

    count: int
    unit: str
    framework: str = ""

    @property
    def text(self) -> str:
        """The warning, in one line."""
        others = numbered(self.unit, range(1, self.count))
        verb = "has" if self.count == 2 else "have"
        with_framework = f" with {self.framework}" if self.framework else ""
        return f"{others} {verb} not connected to {self.unit} 0, so each may be training its own model{with_framework}"

    @classmethod
    def read(cls, claim: Path) -> UnconnectedRanks | None:
        """Read the record of an attempt; None if there is none."""
        fields = read_json_or_empty(claim / FILE_NAME)
        if not fields or describe_wrong_field(fields, _FIELD_TYPES, required=tuple(_FIELD_TYPES)):
            return None
        return cls(**{name: fields[name] for name in _FIELD_TYPES})

    def write(self, claim: Path) -> None:
        """Write the record.

        Raises:
            OSError: it can't be written.
        """
        write_json(claim / FILE_NAME, asdict(self), durable=False)

    @staticmethod
    def withdraw(claim: Path) -> None:
        """Remove the record, once the ranks have connected."""
        with contextlib.suppress(OSError):
            (claim / FILE_NAME).unlink(missing_ok=True)
