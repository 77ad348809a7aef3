"""The drill: a straight run, an interrupted one, and what they left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.drill.comparison import Row, compare
from hpctrain.drill.evidence import read_evidence
from hpctrain.drill.local import LocalTraining
from hpctrain.drill.plan import Plan, enough_steps
from hpctrain.drill.slurm import SlurmTraining
from hpctrain.drill.training import Training
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason

DEFAULTS = (
    "trainer.max_steps=60",
    "trainer.max_epochs=null",
    "trainer.eval_every_steps=20",
    "logger.every_steps=1",
    "logger.tensorboard=false",
    "logger.samples=true",
)
"""What a drill trains with; what is typed comes after it."""
FORCED = ("cluster.wait=false", "cluster.dry_run=false")
ON_GPUS = ("trainer.deterministic=true", "cluster.env.CUBLAS_WORKSPACE_CONFIG=:4096:8")
"""cuBLAS is deterministic only with a workspace of a fixed size."""
STEPS_KEY = "trainer.max_steps"
ALONE_S, TOGETHER_S, ON_SLURM_S = 0.15, 1.5, 2.5
"""Seconds until a stop is acted upon: by one process, by ranks that agree about once a second, by way of SLURM."""


class Progress(Protocol):
    """Where a drill tells how it goes."""

    def step(self, what: str, step: int) -> None:
        """A training completed a step."""

    def say(self, text: str) -> None:
        """Something happened."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """One that took effect.

    Attributes:
        how: the signal or command.
        step: the last one that the attempt completed.
        reason: as the ledger has it.
    """

    how: str
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a drill found.

    Attributes:
        straight: the uninterrupted run.
        interrupted: the other.
        interruptions: that took effect.
        rows: what was compared.
    """

    straight: RunDirectory
    interrupted: RunDirectory
    interruptions: tuple[Interruption, ...]
    rows: tuple[Row, ...]

    @property
    def exact(self) -> bool:
        """Whether there was an interruption, and it changed nothing."""
        return bool(self.interruptions) and all(row.equal for row in self.rows)


@dataclass
class Drill:
    """One drill.

    Args:
        config: of its trainings.
        overrides: from which it was composed; see `overrides_of`.
        typed: those of the user.
        config_dir: more configuration.
        home: the folder for both runs; there is none yet.
        interruptions: how many.
        seed: of their steps and signals.
        progress: told how it goes.
    """

    config: Config
    overrides: Sequence[str]
    typed: Sequence[str]
    config_dir: str | None
    home: Path
    interruptions: int
    seed: int
    progress: Progress
    _running: list[Training] = field(default_factory=list)

    def run(self) -> Report:
        """Do both runs.

        Raises:
            RunFailedError: one of them failed by itself.
        """
        try:
            return self._run()
        except BaseException:
            for training in self._running:
                training.abandon()
            raise

    def _run(self) -> Report:
        overrides = self.overrides
        straight, last = self._straight(overrides)
        steps, step_s = last.end_step or 0, _step_s(last)
        needed = enough_steps(self.interruptions, self._reaction_s, step_s)
        if steps < needed and not any(_key(word) == STEPS_KEY for word in self.typed):
            self.progress.say(f"{steps} steps take {steps * step_s:.1f} s: too short, {needed} it will be")
            shutil.rmtree(straight.path)
            overrides = [f"{STEPS_KEY}={needed}" if _key(word) == STEPS_KEY else word for word in overrides]
            straight, last = self._straight(overrides)
            steps, step_s = last.end_step or 0, _step_s(last)
        plan = Plan(self.interruptions, self.seed, steps, int(self._reaction_s / max(step_s, 1e-6)) + 1)
        interrupted, made = self._interrupted(overrides, plan)
        rows = compare(read_evidence(straight), read_evidence(interrupted))
        return Report(straight=straight, interrupted=interrupted, interruptions=tuple(made), rows=tuple(rows))

    @property
    def _reaction_s(self) -> float:
        if isinstance(self.config.cluster, Slurm):
            return ON_SLURM_S
        return ALONE_S if resources_of(self.config).world_size == 1 else TOGETHER_S

    def _straight(self, overrides: Sequence[str]) -> tuple[RunDirectory, Attempt]:
        training = self._launched("straight", overrides)
        began = time.monotonic()
        last = self._finish(training, 1)
        self.progress.say(f"straight run: {last.end_step} steps in {time.monotonic() - began:.1f} s")
        return training.directory, last

    def _interrupted(self, overrides: Sequence[str], plan: Plan) -> tuple[RunDirectory, list[Interruption]]:
        training = self._launched("interrupted", overrides)
        made: list[Interruption] = []
        done, attempt = 0, 1
        for number in range(plan.interruptions):
            target = plan.target(done, number)
            if not training.wait(attempt, lambda step: self.progress.step("interrupted run", step), until=target):
                break
            how = training.interrupt(plan.signal(number))
            training.wait(attempt, lambda _: None)
            entry = training.ended(attempt)
            done = entry.end_step or 0
            if entry.reason is Reason.COMPLETED:
                self.progress.say(f"interrupted run: {how} after step {target} came too late, the run was completed")
                break
            assert entry.reason is not None
            made.append(Interruption(how, done, entry.reason))
            self.progress.say(f"interrupted run: {how} after step {target}, stopped after step {done} ({entry.reason})")
            attempt += 1
            training.go_on()
        last = self._finish(training, attempt)
        self.progress.say(f"interrupted run: {last.end_step} steps in {last.attempt} attempts")
        return training.directory, made

    def _launched(self, name: str, overrides: Sequence[str]) -> Training:
        kind = SlurmTraining if isinstance(self.config.cluster, Slurm) else LocalTraining
        training = kind(RunDirectory.at(self.home / name), overrides, self.config_dir)
        self._running.append(training)
        training.begin()
        return training

    def _finish(self, training: Training, attempt: int) -> Attempt:
        """Wait until the run is completed, whatever else may interrupt it."""
        name = f"{training.directory.path.name} run"
        while True:
            training.wait(attempt, lambda step: self.progress.step(name, step))
            entry = training.ended(attempt)
            if entry.reason is Reason.COMPLETED:
                self._running.remove(training)
                return entry
            self.progress.say(f"{name}: {entry.reason} after step {entry.end_step}, by nobody of ours")
            attempt += 1
            training.go_on()


def overrides_of(typed: Sequence[str], *, gpus: bool = False) -> list[str]:
    """What the trainings of a drill are launched with."""
    return [*DEFAULTS, *(ON_GPUS if gpus else ()), *typed, *FORCED]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _step_s(attempt: Attempt) -> float:
    """Seconds of a step, the first one left out; 0 where nobody measured."""
    steps = (attempt.end_step or 0) - (attempt.start_step or 0)
    return float(attempt.extra.get("train_s", 0.0)) / max(1, steps - 1)
