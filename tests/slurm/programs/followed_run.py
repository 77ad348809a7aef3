"""One run on a sandbox, which a test follows and interrupts."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.files import read_json_lines
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from hpctrain.run.ledger import Attempt, Ledger

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

TIMEOUT_S = 120.0
ASK_EVERY_S = 2.0
"""Between questions to SLURM whether a run has ended early: each starts a process."""
FINISHED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}


class FollowedRun:
    """One run on a sandbox.

    Attributes:
        sandbox: where it runs.
        directory: of the run.
        pace: the file that says how long a step takes.
        job_id: of its first job.
    """

    def __init__(self, sandbox: SlurmSandbox, path: Path, pace_s: float, pace: Path) -> None:
        self.sandbox, self.directory, self.pace = sandbox, RunDirectory.at(path), pace
        self.set_pace(pace_s)
        self.job_id = ""
        self._asked_at = float("-inf")

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts in the ledger."""
        return Ledger(self.directory).attempts()

    @property
    def story(self) -> list[tuple[int | None, str | None, int | None]]:
        """The first step, the reason for the end and the last step of each attempt."""
        return [(one.start_step, one.reason and one.reason.value, one.end_step) for one in self.attempts]

    @property
    def reasons(self) -> list[str | None]:
        """The reasons for the attempts' ends."""
        return [one.reason and one.reason.value for one in self.attempts]

    @property
    def digest(self) -> str | None:
        """Of the newest intact checkpoint's weights."""
        return next((one.weights_digest for one in reversed(list_checkpoints(self.directory)) if one.intact), None)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((int(record["step"]) for record in read_json_lines(self.directory.metrics)), default=0)

    @property
    def batch_log(self) -> str:
        """The logs of the batch scripts."""
        return "".join(path.read_text() for path in sorted(self.directory.logs.glob("batch_*.log")))

    def set_pace(self, seconds: float) -> None:
        """Set how long a step takes from now on."""
        new = self.pace.with_name(f"{self.pace.name}.new")
        new.write_text(str(seconds))
        new.replace(self.pace)

    def until(self, ready: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait for a condition.

        Raises:
            AssertionError: it didn't become true; the message has the run's logs.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout_s:g} s for {what}\n{self}")
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        """Wait until a step of the run is logged."""
        self.until(lambda: self.step >= step or self._ended_early(), f"step {step}")
        assert self.step >= step, f"no step {step}\n{self}"

    def until_attempt(self, number: int) -> None:
        """Wait until an attempt has begun to train."""
        self.until(lambda: self._began(number) or self._ended_early(), f"attempt {number}")
        assert self._began(number), f"no attempt {number}\n{self}"

    def until_stopped(self, rank: int) -> int:
        """Wait until a rank has stopped itself (SIGSTOP, see `scripted_task`); returns its process."""
        found: dict[int, int] = {}

        def stopped() -> bool:
            found.update({number: pid for pid, number in self.ranks().items()})
            return rank in found and state_of(found[rank]) == "T"

        self.until(lambda: stopped() or self._ended_early(), f"rank {rank} to stop")
        assert stopped(), f"rank {rank} did not stop\n{self}"
        return found[rank]

    def until_ended(self) -> str:
        """Wait until the newest job has ended and no rank is left; returns its JobState.

        From SLURM 24.05 on that is PREEMPTED, however a job ends, if it was ever preempted with grace time and may not
        be requeued: returned is then what earlier versions show.
        """
        self.until(self._over, "the end")
        self.until(lambda: not self.processes(), "the last process", 15)
        state = self.record["JobState"]
        reasons = {"completed": "COMPLETED", "failed": "FAILED"}
        if state != "PREEMPTED" or not self.reasons:
            return state
        assert self.record["Requeue"] == "0", f"SLURM requeues it: {self}"
        return reasons.get(self.reasons[-1], state)

    @property
    def record(self) -> dict[str, str]:
        """The fields of the newest job."""
        return self.sandbox.job(self.newest_job)

    @property
    def newest_job(self) -> str:
        """The job that was submitted last."""
        ids = [str(record["job_id"]) for record in JobRecords(self.directory).read() if "job_id" in record]
        return ids[-1] if ids else self.job_id

    def rank(self, number: int) -> int:
        """The process of a rank, as this machine numbers it."""
        found = [pid for pid, rank in self.ranks().items() if rank == number]
        assert len(found) == 1, f"{len(found)} processes of rank {number}\n{self}"
        return found[0]

    def ranks(self) -> dict[int, int]:
        """The ranks that run now, by process."""
        found = {}
        for pid, line in self.processes().items():
            if re.search(r"hpctrain\.(train|program)", line) and "srun" not in line:
                try:
                    environ = Path(f"/proc/{pid}/environ").read_bytes()
                except OSError:
                    continue
                if match := re.search(rb"SLURM_PROCID=(\d+)", environ):
                    found[pid] = int(match[1])
        return found

    @property
    def supervisor(self) -> int | None:
        """The Python process of the batch script; None while there is none."""
        return next((pid for pid, line in self.processes().items() if "hpctrain.supervise" in line), None)

    def processes(self) -> dict[int, str]:
        """The command lines that name the run's directory, on all nodes, by process."""
        found = {}
        word = re.compile(rf"{re.escape(str(self.directory.path))}(?![\w.-])")  # run_1 is not run_10
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if word.search(line):
                    found[int(entry.name)] = line
        return found

    def preempt(self) -> None:
        """Submit a job that preempts the run, for a moment."""
        self.sandbox.preempt(seconds=1)

    def __str__(self) -> str:
        lines = [f"run {self.directory.path}", *(str(one) for one in self.attempts)]
        for path in sorted(self.directory.logs.glob("*.log")):
            lines += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-25:]]
        lines += ["--- stacks", self._stacks()]
        jobs = self.sandbox.run(["scontrol", "--oneliner", "show", "job"])
        return "\n".join([*lines, "--- jobs", jobs.stdout or jobs.stderr])

    def _stacks(self) -> str:
        """Where the ranks are, if they still run: a hang explains itself."""
        command = [sys.executable, "-m", "hpctrain", "stacks", str(self.directory.path)]
        done = self.sandbox.run(command)
        return done.stdout + done.stderr

    def _began(self, number: int) -> bool:
        return len(self.attempts) >= number

    def _over(self) -> bool:
        attempts = self.attempts
        if not attempts or attempts[-1].may_continue:
            return self._ended_early()
        return self._finished()

    def _ended_early(self) -> bool:
        if time.monotonic() - self._asked_at < ASK_EVERY_S:
            return False
        self._asked_at = time.monotonic()
        return self._finished() and not self.processes() and self._finished()

    def _finished(self) -> bool:
        return self.record["JobState"] in FINISHED


def state_of(pid: int) -> str:
    """A process's state letter of proc(5); empty where the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
