"""The records that ranks write when they begin, because only the rank itself knows its node for certain.

A rank's node can't be computed from its number: SLURM 26.05 places tasks in the order of the cluster's switches, and
users may choose another distribution. `sattach --layout` would query each node, and is missing in containers.
`--distribution=plane=N` would restore the order of the list, and lose the locality for which SLURM changed it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hpctrain.errors import RendezvousError
from hpctrain.files import read_json_or_empty, write_json
from hpctrain.phrases import numbered
from hpctrain.run.record_fields import COUNT, RANKS, TEXT, TIME, decode

if TYPE_CHECKING:
    from hpctrain.cluster.environment import ClusterEnvironment

RANK_ZERO_S = 60.0
"""Seconds to wait for rank zero's record: srun may take long to start the tasks of a large step."""
UNCONNECTED_FILE_NAME = "unconnected_ranks.json"

log = logging.getLogger("hpctrain.run")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """The beginning of one rank that hpctrain launched.

    Attributes:
        rank: its global rank.
        node: SLURM's name for its node, which `sbatch --exclude` takes; empty outside of SLURM.
        host: its host name, which may differ from `node`.
        pid: its process id on that host.
        time: epoch seconds.
    """

    rank: Annotated[int, COUNT]
    node: Annotated[str, TEXT]
    host: Annotated[str, TEXT]
    pid: Annotated[int, COUNT]
    time: Annotated[float, TIME]

    @classmethod
    def of_this_process(cls, environment: ClusterEnvironment) -> StartRecord:
        """The record of this process, which begins now as the rank of an environment."""
        node, host = environment.node_name or "", socket.gethostname()
        return cls(rank=environment.rank, node=node, host=host, pid=os.getpid(), time=time.time())

    @classmethod
    def read(cls, path: Path) -> StartRecord | None:
        """Read a record; None if it is absent, or can't be parsed."""
        return decode(cls, read_json_or_empty(path))

    def write(self, claim: Path) -> None:
        """Write the record into the attempt's claim; file system errors are logged, not raised."""
        try:
            write_json(_path(claim, self.rank), asdict(self), durable=False)
        except OSError as error:
            advice = "if this rank fails, its node can't be identified"
            log.warning("can't write the start record of rank %d on %s (%s): %s", self.rank, self.host, error, advice)


def nodes_by_rank(claim: Path) -> dict[int, str]:
    """SLURM's names for the nodes of the ranks that have recorded their start.

    Args:
        claim: of the attempt.
    """
    records = filter(None, map(StartRecord.read, claim.glob("start_*.json")))
    return {record.rank: record.node for record in records if record.node}


def address_of_rank_zero(
    claim: Path, environment: ClusterEnvironment, is_stopped: Callable[[], bool], timeout_s: float = RANK_ZERO_S
) -> str:
    """Rank zero's node; if no variable names it, wait for rank zero's start record.

    Only for programs, which need MASTER_ADDR when they start. The ranks of a training try several addresses: those that
    were started by hand share no folder, and NFS may show a record late.

    Args:
        claim: of the attempt.
        environment: this rank's place.
        is_stopped: whether this rank is to end, which ends the wait with the likeliest node.
        timeout_s: bound in seconds on the wait.

    Raises:
        RendezvousError: rank zero wrote no record in time.
    """
    if len(environment.address_candidates) == 1:
        return environment.master_addr
    this_process = StartRecord.of_this_process(environment)
    deadline, pause_s = time.monotonic() + timeout_s, 0.02
    while (record := StartRecord.read(_path(claim, 0))) is None or not record.node:
        if is_stopped():
            return environment.master_addr
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"expected rank zero's start record, which names its node, within {timeout_s:.0f} s; see rank zero's "
                "log, and check that its node can write into the run directory",
                waited=True,
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)
        # An NFS client remembers for about 30 s that a file is missing, unless it changes the folder itself.
        this_process.write(claim)
    return record.node


def _path(claim: Path, rank: int) -> Path:
    return claim / f"start_{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnconnectedRanks:
    """Record, in an attempt's claim, that each rank of a program may be training its own model.

    Attributes:
        count: how many ranks there are, or nodes if the program starts the ranks of each node itself.
        unit: `rank` or `node`.
        framework: a launcher such as `torchrun` that the program starts, or `Lightning`, if its script imports it;
            otherwise empty.
    """

    count: Annotated[int, RANKS]
    unit: Annotated[str, TEXT]
    framework: Annotated[str, TEXT] = ""

    @property
    def text(self) -> str:
        """The warning, in one line."""
        names = numbered(self.unit, range(1, self.count))
        verb = "has" if self.count == 2 else "have"
        with_framework = f" with {self.framework}" if self.framework else ""
        return f"{names} {verb} not connected to {self.unit} 0, so each may be training its own model{with_framework}"

    @classmethod
    def read(cls, claim: Path) -> UnconnectedRanks | None:
        """Read the record of an attempt; None if there is none."""
        return decode(cls, read_json_or_empty(claim / UNCONNECTED_FILE_NAME))

    def write(self, claim: Path) -> None:
        """Write the record.

        Raises:
            OSError: it can't be written.
        """
        write_json(claim / UNCONNECTED_FILE_NAME, asdict(self), durable=False)

    @staticmethod
    def withdraw(claim: Path) -> None:
        """Remove the record, once the ranks have connected."""
        with contextlib.suppress(OSError):
            (claim / UNCONNECTED_FILE_NAME).unlink(missing_ok=True)
