"""Runs that a real SLURM interrupts at random moments, in random ways: each ends as a straight one does.

HPCTRAIN_SOAK_SEED draws the same interruptions again; what failed is told with its seed.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import pytest
from performance import perform, staged
from stage import COMMON, Stage, submitters_variables
from trial import PATIENCE_S, Trial

from hpctrain.drill.comparison import TrainingResult, compare, read_result
from hpctrain.files import TEMPORARY_PREFIX
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason

if TYPE_CHECKING:
    from conftest import SlurmSandbox

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
PERSEVERING = ("cluster.requeue.max_failures=100", "cluster.requeue.max_stalled_attempts=100")
"""Whoever is interrupted before his first step again and again has not stalled."""
PACE_S = 0.12
MOMENTS = ("start-up", "start-up", "training", "training", "save")
OUTCOMES = {
    "requeue": {Reason.PREEMPTED},
    "preempt": {Reason.PREEMPTED},
    "TERM": {Reason.INTERRUPTED},
    "USR2": {Reason.TIME_LIMIT},
    "KILL": {Reason.INFRASTRUCTURE},
}
"""What is done to a run, and what its attempt may end by. A signal that comes before anybody hears it kills as well."""
_straight: dict[Path, TrainingResult] = {}
_lock = Lock()


@pytest.fixture(scope="module")
def performances(
    request: pytest.FixtureRequest, sandbox: SlurmSandbox, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    yield from perform(request, sandbox, tmp_path_factory.mktemp("soak"))


def straight(home: Path) -> TrainingResult:
    """What a run leaves that nobody disturbs, on this machine without SLURM."""
    with _lock:
        if home not in _straight:
            path = home / "undisturbed"
            command = [sys.executable, "-m", "hpctrain", *COMMON, *WORDS, f"run_dir={path}"]
            environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
            subprocess.run(
                [*command, "cluster.processes_per_node=2"],
                cwd=home,
                env=environ | submitters_variables(),
                stdout=subprocess.DEVNULL,
                timeout=PATIENCE_S,
                check=True,
            )
            _straight[home] = read_result(RunDirectory.at(path))
        return _straight[home]


def wait_for(trial: Trial, moment: str, draw: random.Random, attempt: int) -> None:
    """The moment of an interruption of this attempt, or a little later."""
    ledger = Ledger(trial.directory)
    trial.until(lambda: ledger.last_claim() >= attempt, f"attempt {attempt}")
    if moment == "start-up":
        time.sleep(draw.uniform(0, 3))
        return
    begun = trial.directory.checkpoint_steps()
    first = (begun[-1] if begun else 0) + draw.randint(1, 5)
    trial.until_step(first)
    if moment == "save":
        checkpoints = trial.directory.checkpoints
        trial.until(
            lambda: list(checkpoints.glob(f"{TEMPORARY_PREFIX}*")) or trial.step > first + 12, "a save in progress"
        )


def interrupt(trial: Trial, kind: str, rank: int) -> None:
    sandbox, job = trial.sandbox, trial.newest_job
    if kind == "preempt":
        trial.preempt()
    elif kind == "requeue":
        sandbox.requeue(job)
    elif kind == "KILL":
        trial.until(lambda: rank in trial.ranks().values(), f"rank {rank}")
        # the rank is older than its loading processes
        os.kill(min(pid for pid, number in trial.ranks().items() if number == rank), signal.SIGKILL)
    else:
        trial.until(trial.ranks, "a rank")  # before there is a step, scancel has nobody to signal
        sandbox.ask("scancel", f"--signal={kind}", job)


def suffer(stage: Stage, trial: Trial, kind: str, moment: str, draw: random.Random) -> None:
    """Interrupt the newest attempt, and see that it ends for that reason, and that the run goes on."""
    ledger = Ledger(trial.directory)
    attempt = len([one for one in trial.attempts if not one.open]) + 1
    wait_for(trial, moment, draw, attempt)
    interrupt(trial, kind, draw.randrange(2))

    def ended() -> bool:
        return any(one.attempt == attempt and not one.open for one in trial.attempts)

    trial.until(ended, f"the end of attempt {attempt} by {kind}, {moment}")
    (reason,) = [one.reason for one in trial.attempts if one.attempt == attempt]
    deaf = {Reason.INFRASTRUCTURE} if moment == "start-up" else set()
    assert reason in OUTCOMES[kind] | deaf, f"{kind}, {moment}: {reason}\n{trial}"
    if reason is Reason.INTERRUPTED:
        trial.until_ended()
        stage.submit(trial, *WORDS, *PERSEVERING)
    else:
        trial.until(lambda: ledger.last_claim() > attempt, f"the attempt after {attempt}")


@pytest.mark.parametrize(
    ("interruptions", "run"),
    [(2, 0), (2, 1), *(pytest.param(5, run, marks=pytest.mark.soak) for run in range(4))],
)
@staged("--nodes=2")
def test_a_run_that_is_interrupted_anyhow_ends_as_a_straight_one(stage: Stage, interruptions: int, run: int) -> None:
    draw = random.Random(f"{SEED} {interruptions} {run}")
    kinds = [draw.choice(list(OUTCOMES)) for _ in range(interruptions)]
    drawn = [(kind, draw.choice(MOMENTS)) for kind in kinds]
    print(f"HPCTRAIN_SOAK_SEED={SEED} run {run}: {drawn}")
    try:
        trial = stage.train(*WORDS, *PERSEVERING, pace_s=PACE_S)
        for kind, moment in drawn:
            suffer(stage, trial, kind, moment, draw)
        trial.set_pace(0)
        assert trial.until_ended() == "COMPLETED", str(trial)
        assert trial.reasons[-1] == "completed", str(trial)
        assert None not in trial.reasons, str(trial)
        assert len(trial.attempts) == interruptions + 1, str(trial)
        assert all(info.intact for info in list_checkpoints(trial.directory)), str(trial)
        for before, after in itertools.pairwise(trial.attempts):
            assert after.start_step == before.extra.get("saved_step", before.end_step), str(trial)
        differing = [
            row for row in compare(straight(stage.folder.parent), read_result(trial.directory)) if not row.equal
        ]
        assert not differing, f"{differing}\n{trial}"
    except BaseException as error:
        error.add_note(f"HPCTRAIN_SOAK_SEED={SEED}, run {run}: {drawn}")
        raise
