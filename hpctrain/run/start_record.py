"""The record that each rank of a launcher writes when it begins: only the rank knows its node for certain.

SLURM 26.05 gives tasks to nodes in the order of the cluster's switches, and users may choose another distribution, so a
node doesn't follow from the number of a rank.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json, write_json
from hpctrain.run.record_fields import COUNT, TEXT, TIME, describe_wrong_field

RANK_ZERO_S = 60.0
"""Seconds to wait for rank zero's record: srun may start the tasks of a large step one after another."""
_FIELD_TYPES = {"rank": COUNT, "node": TEXT, "host": TEXT, "pid": COUNT, "time": TIME}

log = logging.getLogger("hpctrain.run")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """The beginning of one rank.

    Attributes:
        rank: its global rank.
        node: SLURM's name for its node, as `--exclude` takes it; empty outside of SLURM.
        host: the name of its machine, which may differ.
        pid: its process on that machine.
        time: epoch seconds.
    """

    rank: int
    node: str
    host: str
    pid: int
    time: float

    @staticmethod
    def path(claim: Path, rank: int) -> Path:
        """The file of a rank's record in the claim of its attempt."""
        return claim / f"start_{rank}.json"

    @classmethod
    def read(cls, path: Path) -> StartRecord | None:
        """Read a record; None if it is absent, or can't be read."""
        try:
            fields = read_json(path)
            if describe_wrong_field(fields, _FIELD_TYPES, required=tuple(_FIELD_TYPES)):
                return None
            return cls(**{name: fields[name] for name in _FIELD_TYPES})
        except (OSError, RunDirectoryError, TypeError):
            return None


def record_start(claim: Path, environment: ClusterEnvironment) -> None:
    """Record that this process begins as a rank; an error of the file system is only logged.

    Args:
        claim: of its attempt.
        environment: its place.
    """
    record = StartRecord(
        rank=environment.rank,
        node=environment.node_name or "",
        host=socket.gethostname(),
        pid=os.getpid(),
        time=time.time(),
    )
    try:
        write_json(StartRecord.path(claim, record.rank), asdict(record), durable=False)
    except OSError as error:
        log.warning("the start of rank %d on %s can't be recorded: %s", record.rank, record.host, error)


def node_of_ranks(claim: Path) -> dict[int, str]:
    """SLURM's names for the nodes of the ranks that have begun, by rank."""
    records = filter(None, map(StartRecord.read, claim.glob("start_*.json")))
    return {record.rank: record.node for record in records if record.node}


def address_of_rank_zero(claim: Path, environment: ClusterEnvironment, within_s: float = RANK_ZERO_S) -> str:
    """The node of rank zero; if no variable names it, wait for rank zero's start record.

    Args:
        claim: of the attempt, in which this rank has recorded its start.
        environment: this rank's place.
        within_s: seconds to wait; after that, the likeliest node is returned.
    """
    if len(environment.address_candidates) == 1:
        return environment.master_addr
    deadline, pause_s = time.monotonic() + within_s, 0.02
    while (record := StartRecord.read(StartRecord.path(claim, 0))) is None or not record.node:
        if time.monotonic() >= deadline:
            name = environment.master_addr
            log.warning("rank zero recorded no start in %.0f s; see its log; MASTER_ADDR will be %s", within_s, name)
            return name
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 2.0)
        # an NFS client remembers for half a minute that a file is missing, unless it changes the folder itself
        record_start(claim, environment)
    return record.node
