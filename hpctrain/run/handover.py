"""The data that a launcher passes to the ranks that it starts, through their environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "HPCTRAIN_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The data that a rank receives from its launcher; empty for a rank started by hand, with srun or torchrun.

    Attributes:
        attempt: claimed by the launcher, which also records its end; None if rank zero has to do both.
        logged: whether standard output already goes into the rank's log in the run directory.
        store: the file by which ranks on one machine meet, in a folder that only their user may enter; empty without.
        parent: the process id of a launcher on the same machine, whose ranks must not outlive it.
        terminal: the file descriptor of the launcher's terminal, which rank zero inherits; None without one.
        code: digest of the copy of the code from which the rank imports; empty if there is none.
        version: of the launcher's hpctrain, which the rank's has to be; empty if both are the same installation.
    """

    attempt: int | None = None
    logged: bool = False
    store: str = ""
    parent: int | None = None
    terminal: int | None = None
    code: str = ""
    version: str = ""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Handover:
        """Read the variables that the launcher set, if there was one."""
        attempt, parent, terminal = (variables.get(f"{PREFIX}{name}") for name in ("CLAIM", "PARENT", "TERMINAL"))
        return cls(
            attempt=int(attempt) if attempt else None,
            logged=variables.get(f"{PREFIX}LOGGED") == "1",
            store=variables.get(f"{PREFIX}STORE", ""),
            parent=int(parent) if parent else None,
            terminal=int(terminal) if terminal else None,
            code=variables.get(f"{PREFIX}CODE", ""),
            version=variables.get(f"{PREFIX}VERSION", ""),
        )

    def variables(self) -> dict[str, str]:
        """The environment variables that pass this to a rank."""
        # not ATTEMPT: programs get that one, and ranks of hpctrain that a program starts belong to another run
        found = {"CLAIM": self.attempt, "LOGGED": int(self.logged), "STORE": self.store, "PARENT": self.parent}
        found |= {"TERMINAL": self.terminal, "CODE": self.code, "VERSION": self.version}
        return {f"{PREFIX}{name}": str(value) for name, value in found.items() if value}
