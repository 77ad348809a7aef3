"""What a launcher hands to the ranks that it starts, through their environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "HPCTRAIN_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What a rank knows from its launcher; empty for a rank that was started by hand, with srun or torchrun.

    Attributes:
        attempt: already claimed by the launcher, which also records its end; None: rank zero does both.
        logged: standard output already goes into the rank's log in the run directory.
        token: by which this attempt's ranks recognise each other when they meet.
        parent: the process id of a launcher on the same machine, whose ranks must not outlive it.
    """

    attempt: int | None = None
    logged: bool = False
    token: str = ""
    parent: int | None = None

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Handover:
        """Read what the launcher set, if there was one."""
        attempt, parent = variables.get(f"{PREFIX}ATTEMPT"), variables.get(f"{PREFIX}PARENT")
        return cls(
            attempt=int(attempt) if attempt else None,
            logged=variables.get(f"{PREFIX}LOGGED") == "1",
            token=variables.get(f"{PREFIX}TOKEN", ""),
            parent=int(parent) if parent else None,
        )

    def variables(self) -> dict[str, str]:
        """The environment variables that pass this on."""
        found = {"ATTEMPT": self.attempt, "LOGGED": int(self.logged), "TOKEN": self.token, "PARENT": self.parent}
        return {f"{PREFIX}{name}": str(value) for name, value in found.items() if value}
