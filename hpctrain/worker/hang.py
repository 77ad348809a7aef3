"""The watchdog of a rank, and what a rank that hangs writes down before it is ended."""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.run.exit_record import ExitRecord, first_cause, read_exit_records
from hpctrain.run.ledger import Ledger
from hpctrain.run.owner import Owner
from hpctrain.run.reason import Reason
from hpctrain.run.stacks import ask
from hpctrain.worker.phase import Phase
from hpctrain.worker.stacks import STDERR
from hpctrain.worker.watchdog import Hang, Watchdog

if TYPE_CHECKING:
    from hpctrain.worker.rank import Rank

PEERS_S = 3.0
"""Seconds between a rank's last word and its end: the others' connections break then, and they have their say first."""


def watch(rank: Rank) -> Watchdog:
    """The watchdog of this rank, not started yet."""
    place = f"rank {rank.environment.rank} of {rank.environment.world_size} on {socket.gethostname()}"
    return Watchdog(
        rank.config.health,
        phase=lambda: Phase.of(rank.times.doing),
        progress=lambda: rank.progress,
        files=lambda: _files(rank),
        on_hang=partial(_leave, rank),
        describe=lambda: f"{place}, attempt {rank.attempt}, step {rank.step}",
    )


def _files(rank: Rank) -> tuple[Path, Path] | None:
    directory, attempt = rank.directory, rank.attempt
    if directory is None or attempt is None:
        return None
    return directory.stacks(attempt, rank.environment.rank), directory.stacks_request(attempt)


def _leave(rank: Rank, hang: Hang) -> None:
    """Record the hang; runs in the watchdog's thread, and takes no lock that the hanging thread may hold."""
    directory, attempt = rank.directory, rank.attempt
    if directory is None or attempt is None:
        return
    claim = directory.claim(attempt)
    stacks = directory.stacks(attempt, rank.environment.rank)
    record = ExitRecord(
        rank=rank.environment.rank,
        host=socket.gethostname(),
        reason=Reason.HANG,
        step=rank.step,
        message=f"{hang.message}; stacks: {stacks}",
        traceback=hang.stack,
        blames_peer=hang.waits and rank.environment.world_size > 1,
        time=time.time(),
    )
    record.write(claim)
    if rank.environment.world_size > 1:
        # whoever hasn't noticed yet leaves its stacks as well
        ask(directory.stacks_request(attempt))
        time.sleep(PEERS_S)
    cause = first_cause(read_exit_records(claim)) or record
    detail = f"rank {cause.rank} on {cause.host}: {cause.message}"
    owner = Owner.read(claim)
    if owner is not None and owner.is_here and owner.pid == os.getpid():
        # the launcher, who else closes the attempt, ends with this process
        Ledger(directory).end(attempt, reason=Reason.HANG, step=rank.step, detail=detail)
        os.write(
            STDERR, f"hpctrain: stacks: {stacks}; to go on: python -m hpctrain resume {directory.as_typed}\n".encode()
        )
    else:
        rank.close_attempt(Reason.HANG, detail)
