"""The collectives that a rank had begun when it ended: whom it waited for, or who waited for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.run.record_fields import COUNT, TEXT, FieldType, describe_wrong_field

_FIELD_TYPES = {
    "begun": FieldType(
        "counts by group", lambda value: isinstance(value, dict) and all(map(COUNT.accepts, value.values()))
    ),
    "group": TEXT,
    "operation": TEXT,
    "number": COUNT,
}


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one rank.

    Attributes:
        begun: how many it had begun, by backend and group, such as ``nccl default_pg``.
        group: of the oldest collective that wasn't finished; empty if all were.
        operation: of that collective, such as ``all_reduce``.
        number: of that collective in its group, from 1.
    """

    begun: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    operation: str = ""
    number: int = 0

    @classmethod
    def from_json(cls, value: object) -> Collectives | None:
        """Read the field of a record; None if it isn't there, or has another form."""
        if not isinstance(value, dict) or describe_wrong_field(value, _FIELD_TYPES, required=tuple(_FIELD_TYPES)):
            return None
        known: dict[str, Any] = {name: value[name] for name in _FIELD_TYPES}
        return cls(**known)

    @property
    def waits_on_nccl(self) -> bool:
        """Whether the unfinished collective is one of NCCL, for whose result whatever follows on the GPU waits."""
        return self.group.startswith("nccl ")

    @property
    def description(self) -> str:
        """The unfinished one, such as ``all_reduce (collective 120 of nccl default_pg)``; empty without one."""
        return f"{self.operation} (collective {self.number} of {self.group})" if self.group else ""
