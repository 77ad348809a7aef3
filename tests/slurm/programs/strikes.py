"""The strikes of a storm: what happens to a run, in the kinds that a cluster knows."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.slurm.programs.followed_run import FollowedRun

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

SUPERVISORS = 3
"""New ones that the batch script's shell starts in an allocation."""
STRIKES = {
    "preempt": 3,
    "requeue": 2,
    "kill rank": 3,
    "stop rank": 1,
    "kill all ranks": 2,
    "USR2": 2,
    "TERM": 1,
    "kill supervisor": 2,
    "kill node": 1,
    "cut node": 2,
    "crash controller": 1,
    "flip bit": 2,
}
"""The kinds of strikes, and how often each is drawn."""


@dataclass
class Strike:
    """One strike: when, what, at which attempt, and what is known about the effect."""

    when: float
    kind: str
    attempt: int
    note: str = ""


@dataclass
class StruckRun:
    """One run of the storm.

    Attributes:
        number: its number; with the seed it determines what is drawn.
        run: to follow.
        ranks: its world size.
        shape: nodes x processes per node.
        strikes: so far.
        over: whether it has ended.
        problem: why it didn't end as it should; empty if it did.
    """

    number: int
    run: FollowedRun
    ranks: int
    shape: str
    strikes: list[Strike] = field(default_factory=list)
    over: bool = False
    problem: str = ""

    def __str__(self) -> str:
        lines = [f"run {self.number} ({self.shape}), {len(self.strikes)} strikes: {self.problem or 'completed'}"]
        ends = {one.attempt: one for one in self.run.attempts}
        for strike in self.strikes:
            end = ends.get(strike.attempt)
            after = "no record" if end is None else f"{end.reason} at {end.end_step}, next {end.next}"
            when = time.strftime("%H:%M:%S", time.localtime(strike.when))
            lines.append(f"  {when} attempt {strike.attempt}: {strike.kind} {strike.note} -> {after}")
        return "\n".join(lines)


class Striker:
    """Strikes runs on a sandbox; several threads may use it.

    Args:
        sandbox: where they run.

    Attributes:
        away: nodes that are down or cut off for a while, and that nothing else may strike.
        crashes: when the controller was killed.
    """

    def __init__(self, sandbox: SlurmSandbox) -> None:
        self.sandbox = sandbox
        self.away: set[str] = set()
        self.crashes: list[float] = []
        self._choosing = threading.Lock()
        self._controller = threading.Lock()

    def strike(self, struck: StruckRun, kind: str, draw: random.Random) -> str | None:
        """Strike a run; return a note on what was struck, or None if there was nothing to strike."""
        fraction = draw.random()
        note: str | None = getattr(self, f"_{kind.replace(' ', '_').lower()}")(struck, fraction, draw)
        return note

    def _preempt(self, struck: StruckRun, *_: object) -> str | None:
        nodes = self._nodes(struck.run)
        if not nodes:
            return None
        place = ("--partition=high", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}")
        job = self.sandbox.submit(*place, "--exclusive", "--job-name=preempt", "--no-requeue", "--wrap=sleep 1")
        return f"on {','.join(nodes)} by job {job}"

    def _requeue(self, struck: StruckRun, *_: object) -> str | None:
        if not self._nodes(struck.run):
            return None
        self.sandbox.requeue(struck.run.newest_job)
        return ""

    def _kill_rank(self, struck: StruckRun, fraction: float, *_: object) -> str | None:
        return self._signal_rank(struck, fraction, signal.SIGKILL)

    def _stop_rank(self, struck: StruckRun, fraction: float, *_: object) -> str | None:
        note = self._signal_rank(struck, fraction, signal.SIGSTOP)
        if note and struck.ranks == 1:
            # there is no other rank that could notice
            time.sleep(3)
            self._signal_rank(struck, fraction, signal.SIGCONT)
            return f"{note}, for 3 s"
        return note

    def _signal_rank(self, struck: StruckRun, fraction: float, number: signal.Signals) -> str | None:
        ranks = struck.run.ranks()
        chosen = int(fraction * struck.ranks)
        # the rank is older than its loading processes
        pids = sorted(pid for pid, rank in ranks.items() if rank == chosen)
        if not pids:
            return None
        os.kill(pids[0], number)
        return f"rank {chosen}"

    def _kill_all_ranks(self, struck: StruckRun, *_: object) -> str | None:
        pids = list(struck.run.ranks())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"{len(pids)} processes" if pids else None

    def _usr2(self, struck: StruckRun, *_: object) -> str | None:
        return self._scancel(struck, "USR2")

    def _term(self, struck: StruckRun, *_: object) -> str | None:
        return self._scancel(struck, "TERM")

    def _scancel(self, struck: StruckRun, name: str) -> str | None:
        if not struck.run.ranks():
            return None
        self.sandbox.ask("scancel", f"--signal={name}", struck.run.newest_job)
        return ""

    def _kill_supervisor(self, struck: StruckRun, *_: object) -> str | None:
        pid = struck.run.supervisor
        restarts = self.sandbox.job(struck.run.newest_job).get("Restarts")
        note = f"of {struck.run.newest_job}, restarts {restarts}"
        if pid is None or sum(one.note == note for one in struck.strikes) >= SUPERVISORS:
            return None
        os.kill(pid, signal.SIGKILL)
        return note

    def _kill_node(self, struck: StruckRun, fraction: float, draw: random.Random) -> str | None:
        with self._away(struck.run, fraction) as node:
            if node is None:
                return None
            seconds = draw.uniform(1, 25)
            self.sandbox.kill_node(node)
            time.sleep(seconds)
            self.sandbox.revive_node(node)
            return f"{node} for {seconds:.1f} s"

    def _cut_node(self, struck: StruckRun, fraction: float, draw: random.Random) -> str | None:
        with self._away(struck.run, fraction) as node:
            if node is None:
                return None
            seconds = draw.uniform(0.5, 6)
            self.sandbox.cut(node)
            time.sleep(seconds)
            self.sandbox.mend(node)
            return f"{node} for {seconds:.1f} s"

    def _crash_controller(self, _: StruckRun, fraction: float, draw: random.Random) -> str:
        seconds = draw.uniform(0.2, 6)
        with self._controller:
            self.crashes.append(time.time())
            self.sandbox.command("crash-controller", "--seconds", f"{seconds:.1f}")
        return f"for {seconds:.1f} s"

    def _flip_bit(self, struck: StruckRun, fraction: float, draw: random.Random) -> str | None:
        """Flip a bit in the newest checkpoint, and kill the ranks, so that it is read."""
        directory = struck.run.directory
        steps = directory.checkpoint_steps()
        # of those that are left, one must be intact
        if len(steps) < 3 or any(one.kind == "flip bit" and one.note == f"step {steps[-2]}" for one in struck.strikes):
            return None
        files = sorted(path for path in directory.checkpoint(steps[-1]).rglob("*") if path.is_file())
        path = draw.choice(files)
        with path.open("r+b") as file:
            data = bytearray(file.read())
            data[int(fraction * len(data))] ^= 1 << draw.randrange(8)
            file.seek(0)
            file.write(data)
        self._kill_all_ranks(struck)
        return f"step {steps[-1]}"

    def _nodes(self, run: FollowedRun) -> list[str]:
        rows = self.sandbox.ask("squeue", "--noheader", "--states=running", "--format=%i|%N").splitlines()
        nodes = dict(row.split("|") for row in rows).get(run.newest_job)
        return self.sandbox.ask("scontrol", "show", "hostnames", nodes).split() if nodes else []

    @contextlib.contextmanager
    def _away(self, run: FollowedRun, fraction: float) -> Iterator[str | None]:
        """A node of the run that nothing else strikes meanwhile."""
        nodes = self._nodes(run)
        with self._choosing:
            free = [node for node in nodes if node not in self.away]
            node = free[int(fraction * len(free))] if free else None
            if node:
                self.away.add(node)
        try:
            yield node
        finally:
            if node:
                self.away.discard(node)
