"""One rank as a member of an attempt: its files in the run directory, and its exit record."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Claim
from hpctrain.run.reason import Reason
from hpctrain.streams import LostOutput

log = logging.getLogger("hpctrain.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank as a member of an attempt.

    Attributes:
        environment: its place among the ranks.
        claim: of the attempt.
    """

    environment: ClusterEnvironment
    claim: Claim

    @property
    def directory(self) -> RunDirectory:
        """The run directory."""
        return self.claim.ledger.directory

    @property
    def attempt(self) -> int:
        """The attempt's number."""
        return self.claim.attempt

    @property
    def claim_folder(self) -> Path:
        """The folder of the claim."""
        return self.directory.attempt(self.attempt)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero, which records for all ranks."""
        return self.environment.rank == 0

    @property
    def stacks(self) -> Path:
        """The file for its stacks."""
        return self.directory.stacks(self.attempt, self.environment.rank)

    @property
    def stacks_request(self) -> Path:
        """Where requests for stacks are left."""
        return self.directory.stacks_request(self.attempt)

    def describe(self, step: int) -> str:
        """Rank, host, attempt and step."""
        place = f"rank {self.environment.rank} of {self.environment.world_size} on {socket.gethostname()}"
        return f"{place}, attempt {self.attempt}, step {step}"

    def exit_record(self, reason: Reason, step: int, lost: LostOutput) -> ExitRecord:
        """Make the exit record of a rank that ends now.

        Args:
            reason: why it ends.
            step: the last one that it completed.
            lost: the output that its log lacks.
        """
        return ExitRecord(
            rank=self.environment.rank,
            host=socket.gethostname(),
            reason=reason,
            step=step,
            time=time.time(),
            lost_lines=lost.lines,
            lost_bytes=lost.size_bytes,
        )

    def write(self, record: ExitRecord) -> None:
        """Write the exit record; an error of the file system is only logged."""
        try:
            record.write(self.claim_folder)
        except OSError as refused:
            log.warning("the exit record can't be written: %s", refused)
