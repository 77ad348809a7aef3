"""A storm: many runs on one sandbox, each struck again and again at random moments, in random ways."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from followed_run import FINISHED, FollowedRun
from submitted_runs import SubmittedRuns, submitters_variables

from hpctrain.files import read_json_lines

if TYPE_CHECKING:
    from conftest import SlurmSandbox

STEPS = 400
PACE_S = 0.15
SHAPES = {"1x1": (1, 1), "2x1": (2, 1), "3x1": (3, 1), "4x1": (4, 1), "2x2": (2, 2)}
"""Nodes, and processes per node."""
PARTITIONS = ("low_requeue", "low_requeue_0", "low_cancel", "low_cancel_0")
WORDS = (
    f"trainer.max_steps={STEPS}",
    "trainer.max_epochs=null",
    "trainer.global_batch_size=12",
    *("checkpoint.every_steps=10", "checkpoint.keep=4"),
    *("health.hang_timeout_s=10", "health.save_timeout_s=20", "health.start_timeout_s=90"),
)
"""What decides the weights, too: a straight run has the same."""
ON_SLURM = (
    *("cluster.requeue.max_failures=1000", "cluster.requeue.max_stalled_attempts=1000"),
    "+cluster.sbatch.exclusive=true",  # what strikes a node strikes one run
)
SUPERVISORS = 3
"""New ones that the batch script's shell starts in an allocation."""
END_S = 420.0
"""For a run that isn't struck any more."""
OVER = {*FINISHED, "PREEMPTED", "UNKNOWN"}
FORGETS_S = 30.0
"""A controller that is killed may forget what it did in so many seconds, on a busy machine."""
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
            after = "no record" if end is None else f"{end.reason} at {end.end_step}, next {end.extra.get('next')}"
            when = time.strftime("%H:%M:%S", time.localtime(strike.when))
            lines.append(f"  {when} attempt {strike.attempt}: {strike.kind} {strike.note} -> {after}")
        return "\n".join(lines)


class Administrator:
    """Looks after the sandbox: releases held jobs and resumes drained nodes, which SLURM does only when asked.

    Attributes:
        states: the state of each job that SLURM knows.
        acts: what it had to do, and how often.
    """

    def __init__(self, sandbox: SlurmSandbox, log: Callable[[str], None]) -> None:
        self.sandbox = sandbox
        self.states: dict[str, str] = {}
        self.acts: Counter[str] = Counter()
        self.away: set[str] = set()
        self._log = log
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Administrator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(90)

    def _look(self) -> None:
        while not self._stopped.wait(1.0):
            with contextlib.suppress(AssertionError):  # the controller may be away
                self._release()
                self._resume()

    def _release(self) -> None:
        rows = self.sandbox.ask("squeue", "--noheader", "--states=all", "--format=%i|%T|%r").splitlines()
        found = [row.split("|") for row in rows]
        self.states = {job: state for job, state, _ in found}
        for job, state, reason in found:
            if state == "PENDING" and "held" in reason.lower():
                self._act(f"release ({reason})", job, "scontrol", "release", job)

    def _resume(self) -> None:
        rows = self.sandbox.ask("sinfo", "--noheader", "--Node", "--partition=low", "--format=%n %T").splitlines()
        for node, state in (row.split() for row in rows):
            if node not in self.away and state.startswith(("drain", "down")):
                self._act(f"resume ({state})", node, "scontrol", "update", f"nodename={node}", "state=resume")

    def _act(self, what: str, name: str, *command: str) -> None:
        self.acts[what] += 1
        self._log(f"administrator: {what} {name}")
        self.sandbox.run(command)


class Storm:
    """Strikes runs, several at once, until there were enough strikes.

    Args:
        runs: submits them.
        seed: of all that is drawn.
        strikes: at least so many in total.
        at_once: runs at the same time.
        per_run: strikes of one run.
        log: a file that each strike is written to at once.
    """

    def __init__(self, runs: SubmittedRuns, seed: int, *, strikes: int, at_once: int, per_run: int, log: Path) -> None:
        self.runs, self.sandbox = runs, runs.sandbox
        self.seed, self.strikes, self.at_once, self.per_run = seed, strikes, at_once, per_run
        self.struck: list[StruckRun] = []
        self.crashes: list[float] = []
        self._log_path = log
        self._lock = threading.Lock()
        self._controller = threading.Lock()
        self.administrator = Administrator(self.sandbox, self.log)

    @property
    def count(self) -> int:
        """Strikes so far."""
        return sum(len(one.strikes) for one in self.struck)

    def log(self, text: str) -> None:
        """Append a line to the log."""
        with self._log_path.open("a") as file:
            print(time.strftime("%H:%M:%S"), text, file=file)

    def blow(self) -> None:
        """Strike runs until there were enough strikes, and wait for the runs' ends."""
        with self.administrator:
            threads = [threading.Thread(target=self._runs_in_turn, daemon=True) for _ in range(self.at_once)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _runs_in_turn(self) -> None:
        while True:
            with self._lock:
                # those that are being struck will get all of theirs
                expected = sum(len(one.strikes) if one.over else self.per_run for one in self.struck)
                if expected >= self.strikes:
                    return
                struck = self._new()
            try:
                self._drive(struck)
            except Exception as error:
                struck.problem = struck.problem or f"{type(error).__name__}: {error}"
            struck.over = True
            self.log(str(struck))

    def _new(self) -> StruckRun:
        number = len(self.struck)
        # each shape comes up, whatever is drawn
        shape = list(SHAPES)[number % len(SHAPES)]
        nodes, per_node = SHAPES[shape]
        struck = StruckRun(number, self.runs.new(PACE_S), nodes * per_node, shape)
        self.struck.append(struck)
        return struck

    def _drive(self, struck: StruckRun) -> None:
        draw = random.Random(f"{self.seed} {struck.number}")
        nodes, per_node = SHAPES[struck.shape]
        own = (f"cluster.processes_per_node={per_node}", f"cluster.partition={draw.choice(PARTITIONS)}")
        workers = f"data.num_workers={draw.choice([0, 1])}"
        self.log(f"run {struck.number} ({struck.shape}) {own[1]} {workers}")
        self.runs.submit(struck.run, *WORDS, *ON_SLURM, *own, workers, nodes=nodes)
        while len(struck.strikes) < self.per_run:
            kind = draw.choices(list(STRIKES), list(STRIKES.values()))[0]
            moment, pause_s = draw.choice(["start-up", "ranks", "training", "training"]), draw.uniform(0.2, 4)
            if not self._until(struck, moment):
                return
            time.sleep(pause_s)
            self._strike(struck, kind, draw)
        struck.run.set_pace(0)
        if self._until(struck, "end"):
            struck.problem = f"not over after {END_S:g} s"

    def _until(self, struck: StruckRun, moment: str) -> bool:
        """Wait for a moment at which something can be struck; False if the run is over."""
        run, deadline = struck.run, time.monotonic() + END_S
        since = None
        while time.monotonic() < deadline:
            over = self.administrator.states.get(run.newest_job, "UNKNOWN") in OVER and not run.processes()
            since = (since or time.monotonic()) if over else None
            # a job that SLURM ended and hpctrain requeues is finished for a moment
            if since is not None and time.monotonic() - since > 8:
                if run.reasons[-1:] == ["completed"]:
                    return False
                if not self._forgotten(run):
                    struck.problem = f"ended as {run.reasons[-1:]}, {self.administrator.states.get(run.newest_job)}"
                    return False
                self._resume(struck)
                since = None
            if not over and moment != "end" and self._is(run, moment):
                return True
            time.sleep(0.4)
        return True

    def _forgotten(self, run: FollowedRun) -> bool:
        """Whether the controller was killed soon after it had taken a request of the run, which it has then forgotten.

        It writes its state down some seconds later (seen on SLURM 22.05).
        """
        attempts = run.attempts
        if attempts and attempts[-1].extra.get("next") not in ("requeue", "resubmit"):
            return False
        asked = (attempts[-1].end_time or 0.0) if attempts else float(run.directory.job_records()[-1]["time"])
        return any(asked - 1 <= crash <= asked + FORGETS_S for crash in self.crashes)

    def _resume(self, struck: StruckRun) -> None:
        """What is left to a user whose job the controller has forgotten."""
        self.log(f"run {struck.number}: the controller has forgotten job {struck.run.newest_job}: resume")
        with self._lock:
            self.administrator.acts["resume (forgotten by the controller)"] += 1
        command = [sys.executable, "-m", "hpctrain", "resume", str(struck.run.directory.path)]
        done = self.sandbox.run(command, cwd=self.runs.folder, env=submitters_variables())
        assert done.returncode == 0, done.stdout + done.stderr

    def _is(self, run: FollowedRun, moment: str) -> bool:
        if moment == "start-up":
            return run.supervisor is not None
        if moment == "ranks":
            return bool(run.ranks())
        attempts = run.attempts
        return bool(attempts) and attempts[-1].open and run.step > (attempts[-1].start_step or 0)

    def _strike(self, struck: StruckRun, kind: str, draw: random.Random) -> None:
        run = struck.run
        attempt = max(run.directory.claimed_attempts(), default=0)
        strike = Strike(time.time(), kind, attempt)
        fraction = draw.random()
        try:
            note = getattr(self, f"_{kind.replace(' ', '_').lower()}")(struck, fraction, draw)
        except Exception as error:
            note = f"missed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if note is None:
            self.log(f"run {struck.number} attempt {attempt} step {run.step}: no {kind}: nothing to strike")
            return
        strike.note = note
        struck.strikes.append(strike)
        self.log(f"run {struck.number} attempt {attempt} step {run.step}: {kind} {note} ({self.count} strikes)")

    # each returns a note on what it struck, or None if there was nothing to strike

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
        with self._lock:
            free = [node for node in nodes if node not in self.administrator.away]
            node = free[int(fraction * len(free))] if free else None
            if node:
                self.administrator.away.add(node)
        try:
            yield node
        finally:
            if node:
                self.administrator.away.discard(node)

    def check(self, straight: Callable[..., str]) -> None:
        """Compare each run with a straight one; note what differs."""
        for struck in self.struck:
            if struck.problem:
                continue
            run = struck.run
            logged = [record["step"] for record in read_json_lines(run.directory.metrics)]
            if run.reasons[-1:] != ["completed"] or {None, "cancelled", "failed", "stalled"} & set(run.reasons):
                struck.problem = f"attempts ended as {run.reasons}"
            elif run.digest != straight(*WORDS, processes=struck.ranks):
                struck.problem = "other weights than a straight run's"
            elif logged != list(range(1, STEPS + 1)):
                struck.problem = "not each step is logged once"
