"""A storm: many runs on one sandbox, each struck again and again at random moments, in random ways."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.files import read_json_lines
from hpctrain.run.job_records import JobRecords
from tests.slurm.programs.followed_run import FINISHED, FollowedRun
from tests.slurm.programs.strikes import STRIKES, Strike, Striker, StruckRun
from tests.slurm.programs.submitted_runs import SubmittedRuns

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

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
END_S = 900.0
"""For a run that isn't struck any more: SLURM can take seven minutes to notice a batch host that died and came back."""
OVER = {*FINISHED, "PREEMPTED", "UNKNOWN"}
FORGETS_S = 30.0
"""A controller that is killed may forget what it did in so many seconds, on a busy machine."""
EARLY_S = 22.0
"""The sandbox's KillWait and a margin: a job that SLURM is killing is requeued so long before its attempt ends."""


class Administrator:
    """Looks after the sandbox: releases held jobs and resumes drained nodes, which SLURM does only when asked.

    Args:
        sandbox: to look after.
        away: nodes that are away for a while, and come back by themselves.
        log: writes a line.

    Attributes:
        states: the state of each job that SLURM knows.
        acts: what it had to do, and how often.
    """

    def __init__(self, sandbox: SlurmSandbox, away: Collection[str], log: Callable[[str], None]) -> None:
        self.sandbox = sandbox
        self.states: dict[str, str] = {}
        self.acts: Counter[str] = Counter()
        self._away = away
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
            if node not in self._away and state.startswith(("drain", "down")):
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
        self._log_path = log
        self._lock = threading.Lock()
        self.striker = Striker(self.sandbox)
        self.administrator = Administrator(self.sandbox, self.striker.away, self.log)

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
            left = list(struck.run.processes().values())
            struck.problem = f"not over after {END_S:g} s; its processes: {left}"

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
                left_by = self._left_by(struck)
                if not left_by:
                    struck.problem = f"ended as {run.reasons[-1:]}, {self.administrator.states.get(run.newest_job)}"
                    return False
                self._resume(struck, left_by)
                since = None
            if not over and moment != "end" and self._is(run, moment):
                return True
            time.sleep(0.4)
        return True

    def _left_by(self, struck: StruckRun) -> str:
        """Who ended a run that hpctrain can't continue; empty if it should have."""
        if self._forgotten(struck.run):
            return "the controller has forgotten its job"
        if self._lost_its_host(struck):
            return "its batch host died while SLURM preempted its job, to be cancelled"
        return ""

    def _lost_its_host(self, struck: StruckRun) -> bool:
        """Whether the batch host was dead when SLURM cancelled the preempted job: nobody was there to requeue it."""
        attempt = max(struck.run.directory.claimed_attempts(), default=0)
        killed = [one.note.split()[0] for one in struck.strikes if (one.kind, one.attempt) == ("kill node", attempt)]
        if not killed or self.administrator.states.get(struck.run.newest_job) != "PREEMPTED":
            return False
        return struck.run.record["BatchHost"] in killed

    def _forgotten(self, run: FollowedRun) -> bool:
        """Whether the controller was killed soon after it had taken a request of the run, or had started its job.

        It writes its state down some seconds later (seen on SLURM 22.05). SLURM 26.05 ends a job whose start it has
        forgotten ("Killing non-startable batch JobId"), with the state FAILED; 22.05 starts it again.
        """
        attempts = run.attempts
        if not attempts:
            when = float(JobRecords(run.directory).read()[-1]["time"])
        elif attempts[-1].open:
            when = attempts[-1].start_time or 0.0
        elif attempts[-1].next in ("requeue", "resubmit"):
            when = attempts[-1].end_time or 0.0
        else:
            return False
        return any(when - EARLY_S <= crash <= when + FORGETS_S for crash in self.striker.crashes)

    def _resume(self, struck: StruckRun, left_by: str) -> None:
        """What is left to the user."""
        self.log(f"run {struck.number}: {left_by}, {struck.run.newest_job}: resume")
        with self._lock:
            self.administrator.acts[f"resume ({left_by})"] += 1
        command = [sys.executable, "-m", "hpctrain", "resume", str(struck.run.directory.path)]
        done = self.sandbox.run(command, cwd=self.runs.folder)
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
        try:
            note = self.striker.strike(struck, kind, draw)
        except Exception as error:
            note = f"missed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if note is None:
            self.log(f"run {struck.number} attempt {attempt} step {run.step}: no {kind}: nothing to strike")
            return
        strike.note = note
        struck.strikes.append(strike)
        self.log(f"run {struck.number} attempt {attempt} step {run.step}: {kind} {note} ({self.count} strikes)")

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
