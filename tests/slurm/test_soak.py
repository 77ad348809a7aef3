"""Runs that a real SLURM interrupts at random moments, in random ways: each ends as a straight one does.

A failure names its seed; HPCTRAIN_SOAK_SEED=SEED draws the same interruptions again. `pytest -m soak` adds a storm of
HPCTRAIN_SOAK_STRIKES (200) strikes at HPCTRAIN_SOAK_AT_ONCE (5) runs at a time.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from hpctrain.drill.comparison import compare, read_result
from hpctrain.files import TEMPORARY_PREFIX
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from tests.slurm.programs.followed_run import FollowedRun
from tests.slurm.programs.storm import Storm
from tests.slurm.programs.submitted_runs import Straight, SubmittedRuns

STORM = int(os.environ.get("HPCTRAIN_SOAK_STRIKES") or 200)
AT_ONCE = int(os.environ.get("HPCTRAIN_SOAK_AT_ONCE") or 5)
PER_RUN = 8
SEED = int(os.environ.get("HPCTRAIN_SOAK_SEED") or secrets.randbelow(10**6))
WORDS = (
    *(
        "trainer.max_steps=150",
        "trainer.max_epochs=null",
        "trainer.eval_every_steps=30",
        "+task.eval_samples=16",
        "+task.ballast_mb=40",
    ),
    *("checkpoint.every_steps=6", "data.num_workers=1", "logger.samples=true"),
)
WITHOUT_LIMITS = ("cluster.requeue.max_failures=100", "cluster.requeue.max_stalled_attempts=100")
"""A run that is interrupted again and again before its first step hasn't stalled."""
PACE_S = 0.12
MOMENTS = ("start-up", "start-up", "training", "training", "save")
OUTCOMES = {
    "requeue": {Reason.PREEMPTED},
    "preempt": {Reason.PREEMPTED},
    "TERM": {Reason.INTERRUPTED},
    "USR2": {Reason.TIME_LIMIT},
    "KILL": {Reason.INFRASTRUCTURE},
}
"""The interruptions, and the reasons for which an attempt may end then. A signal before its handler kills the rank."""


def wait_for(run: FollowedRun, moment: str, draw: random.Random, attempt: int) -> None:
    """The moment of an interruption of this attempt, or a little later."""
    ledger = Ledger(run.directory)
    run.until(lambda: ledger.last_claim() >= attempt, f"attempt {attempt}")
    if moment == "start-up":
        time.sleep(draw.uniform(0, 3))
        return
    begun = run.directory.checkpoint_steps()
    first = (begun[-1] if begun else 0) + draw.randint(1, 5)
    run.until_step(first)
    if moment == "save":
        checkpoints = run.directory.checkpoints
        run.until(lambda: list(checkpoints.glob(f"{TEMPORARY_PREFIX}*")) or run.step > first + 12, "a save in progress")


def interrupt(run: FollowedRun, kind: str, rank: int) -> None:
    sandbox, job = run.sandbox, run.newest_job
    if kind == "preempt":
        run.preempt()
    elif kind == "requeue":
        sandbox.requeue(job)
    elif kind == "KILL":
        run.until(lambda: rank in run.ranks().values(), f"rank {rank}")
        # the rank is older than its loading processes
        os.kill(min(pid for pid, number in run.ranks().items() if number == rank), signal.SIGKILL)
    else:
        run.until(run.ranks, "a rank")  # before there is a step, scancel signals no process
        sandbox.ask("scancel", f"--signal={kind}", job)


def interrupt_attempt(run: FollowedRun, kind: str, moment: str, draw: random.Random) -> None:
    """Interrupt the newest attempt, and check that it ends for that reason and that the run continues."""
    ledger = Ledger(run.directory)
    attempt = len([one for one in run.attempts if not one.open]) + 1
    wait_for(run, moment, draw, attempt)
    interrupt(run, kind, draw.randrange(2))

    def ended() -> bool:
        return any(one.attempt == attempt and not one.open for one in run.attempts)

    run.until(ended, f"the end of attempt {attempt} by {kind}, {moment}")
    (reason,) = [one.reason for one in run.attempts if one.attempt == attempt]
    unhandled = {Reason.INFRASTRUCTURE} if moment == "start-up" else set()
    assert reason in OUTCOMES[kind] | unhandled, f"{kind}, {moment}: {reason}\n{run}"
    run.until(lambda: ledger.last_claim() > attempt, f"the attempt after {attempt}")


@pytest.mark.nightly
@pytest.mark.parametrize(("interruptions", "number"), [(2, 0), (2, 1)])
def test_a_run_that_is_interrupted_anyhow_ends_as_a_straight_one(
    runs: SubmittedRuns, straight: Straight, interruptions: int, number: int
) -> None:
    draw = random.Random(f"{SEED} {interruptions} {number}")
    kinds = [draw.choice(list(OUTCOMES)) for _ in range(interruptions)]
    drawn = [(kind, draw.choice(MOMENTS)) for kind in kinds]
    print(f"HPCTRAIN_SOAK_SEED={SEED} run {number}: {drawn}")
    try:
        run = runs.train(*WORDS, *WITHOUT_LIMITS, pace_s=PACE_S)
        for kind, moment in drawn:
            interrupt_attempt(run, kind, moment, draw)
        run.set_pace(0)
        assert run.until_ended() == "COMPLETED", str(run)
        assert run.reasons[-1] == "completed", str(run)
        assert None not in run.reasons, str(run)
        assert len(run.attempts) == interruptions + 1, str(run)
        assert all(info.intact for info in list_checkpoints(run.directory)), str(run)
        for before, after in itertools.pairwise(run.attempts):
            assert after.start_step == (before.end_step if before.saved_step is None else before.saved_step), str(run)
        differing = [
            row for row in compare(read_result(straight.run(*WORDS)), read_result(run.directory)) if not row.equal
        ]
        assert not differing, f"{differing}\n{run}"
    except BaseException as error:
        error.add_note(f"HPCTRAIN_SOAK_SEED={SEED}, run {number}: {drawn}")
        raise


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
@pytest.mark.sandbox("--nodes=12", "--every-preemption", "--node-timeout=15")
def test_a_storm(runs: SubmittedRuns, straight: Straight, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Many runs at once, struck by all that befalls a job; see `storm`."""
    log = tmp_path / "storm.log"
    with capsys.disabled():
        print(f"\nHPCTRAIN_SOAK_SEED={SEED} HPCTRAIN_SOAK_STRIKES={STORM} HPCTRAIN_SOAK_AT_ONCE={AT_ONCE}; log: {log}")
    storm = Storm(runs, SEED, strikes=STORM, at_once=AT_ONCE, per_run=PER_RUN, log=log)
    storm.blow()
    storm.check(straight)
    kinds = Counter(strike.kind for one in storm.struck for strike in one.strikes)
    with capsys.disabled():
        print(f"{storm.count} strikes at {len(storm.struck)} runs: {dict(kinds)}")
        print(f"administrator: {dict(storm.administrator.acts)}")
    wrong = [one for one in storm.struck if one.problem]
    assert not wrong, "\n".join(f"{one}\n{one.run}" for one in wrong)
    assert storm.count >= STORM
