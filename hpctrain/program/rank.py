"""One rank of a program: its place, the folder of its session, and its exit record."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import ProgramConfig
from hpctrain.files import read_json_or_empty
from hpctrain.program.output import ProgramOutput
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Claim, Ledger
from hpctrain.run.reason import Reason

log = logging.getLogger("hpctrain.program")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRank:
    """One rank of a program, as its process of hpctrain's sees it.

    Attributes:
        config: of the run.
        directory: of the run.
        attempt: the attempt's number.
        environment: its place. With ``run.processes=node`` each node is one rank here.
        session: the folder through which the program reports and learns of a stop.
        code: the copy of the code in which the program runs; None if it runs where it was launched.
        output: of the program.
        deadline: epoch seconds at which the job's time is over; None if that isn't known.
    """

    config: ProgramConfig
    directory: RunDirectory
    attempt: int
    environment: ClusterEnvironment
    session: Path
    output: ProgramOutput
    code: CodeSnapshot | None = None
    deadline: float | None = None

    @property
    def number(self) -> int:
        """The rank in the world."""
        return self.environment.rank

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank zero, which records for all ranks."""
        return self.number == 0

    @property
    def claim(self) -> Claim:
        """The claim of its attempt."""
        return Claim(Ledger(self.directory), self.attempt)

    @property
    def claim_folder(self) -> Path:
        """The folder of the claim."""
        return self.directory.attempt(self.attempt)

    @property
    def spawns(self) -> bool:
        """Whether the program starts the ranks of its node by itself."""
        return self.config.run.processes == "node"

    @property
    def log(self) -> Path:
        """The file with the output of the program."""
        return self.directory.rank_log(self.number)

    @property
    def submit_dir(self) -> Path:
        """The folder in which the run was launched."""
        if self.code is not None:
            return self.code.submit_dir
        return Path(str(read_json_or_empty(self.directory.manifest).get("folder") or Path.cwd()))

    @property
    def folder(self) -> Path:
        """The program's working directory."""
        return self.submit_dir if self.code is None else self.code.working_directory

    @property
    def stacks(self) -> Path:
        """The file for its stacks."""
        return self.directory.stacks(self.attempt, self.number)

    def describe(self, step: int) -> str:
        """Rank, host, attempt and step."""
        place = f"rank {self.number} of {self.environment.world_size} on {socket.gethostname()}"
        return f"{place}, attempt {self.attempt}, step {step}"

    def write_exit_record(
        self,
        reason: Reason,
        *,
        step: int = 0,
        message: str = "",
        traceback: str = "",
        blames_peer: bool = False,
        stop_signal: int | None = None,
        done: bool = False,
    ) -> None:
        """Write the exit record, with the fields of `ExitRecord`; an error of the file system is only logged."""
        lost = self.output.lost
        record = ExitRecord(
            rank=self.number,
            host=socket.gethostname(),
            reason=reason,
            step=step,
            message=message,
            traceback=traceback,
            blames_peer=blames_peer,
            stop_signal=stop_signal,
            time=time.time(),
            done=done,
            lost_lines=lost.lines,
            lost_bytes=lost.size_bytes,
        )
        try:
            record.write(self.claim_folder)
        except OSError as refused:
            log.warning("the exit record can't be written: %s", refused)
