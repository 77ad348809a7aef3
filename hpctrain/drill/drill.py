"""The drill: an uninterrupted run, an interrupted one, and the comparison of their results."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.drill.comparison import Row, compare, read_result
from hpctrain.drill.console import Console
from hpctrain.drill.plan import Plan, enough_steps
from hpctrain.drill.training import LocalTraining, SubmittedTraining, Training
from hpctrain.phrases import counted
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import is_evaluation
from hpctrain.run.ledger import Attempt
from hpctrain.run.reason import Reason
from hpctrain.status.metrics import read_metrics

STEPS = 60
EVAL_EVERY_STEPS = 20
STEPS_KEY = "trainer.max_steps"
EVAL_KEY = "trainer.eval_every_steps"
DEFAULTS = (
    f"{STEPS_KEY}={STEPS}",
    "trainer.max_epochs=null",
    f"{EVAL_KEY}={EVAL_EVERY_STEPS}",
    "logger.every_steps=1",
    "logger.tensorboard=false",
    "logger.wandb.enabled=false",
    "logger.mlflow.enabled=false",
    "logger.samples=true",
)
"""The overrides of every drill; the user's own come after them."""
# the drill itself watches its runs
FORCED = ("cluster.wait=false", "cluster.dry_run=false")
ON_GPUS = ("trainer.deterministic=true", "cluster.env.CUBLAS_WORKSPACE_CONFIG=:4096:8")
"""cuBLAS is deterministic only with a workspace of a fixed size."""
ONE_PROCESS_S = 0.15
"""Seconds from an interruption to the last step of an attempt, with one process."""
SEVERAL_RANKS_S = 1.5
"""Seconds from an interruption to the last step with several ranks, which agree on a stop at least once a second."""
ON_SLURM_S = 2.5
"""Seconds from an interruption to the last step on SLURM."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """An interruption that took effect.

    Attributes:
        how: the signal or command.
        step: the last step that the attempt completed.
        reason: why the attempt ended, from the ledger.
    """

    how: str
    step: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a drill.

    Attributes:
        straight: the uninterrupted run.
        interrupted: the interrupted run.
        interruptions: those that took effect.
        rows: the compared quantities.
    """

    straight: RunDirectory
    interrupted: RunDirectory
    interruptions: tuple[Interruption, ...]
    rows: tuple[Row, ...]

    @property
    def exact(self) -> bool:
        """Whether the run was interrupted, and the interruptions changed nothing."""
        return bool(self.interruptions) and all(row.equal for row in self.rows)


@dataclass(kw_only=True)
class Drill:
    """One drill.

    Args:
        config: of its trainings.
        overrides: those from which the config was composed; see `overrides_of`.
        typed: the overrides that the user typed.
        config_dir: a folder with more configuration.
        home: the folder of both runs, which is empty.
        interruptions: number of interruptions.
        seed: of their steps and signals.
        console: displays the progress.
    """

    config: Config
    overrides: Sequence[str]
    typed: Sequence[str]
    config_dir: str | None
    home: Path
    interruptions: int
    seed: int
    console: Console
    _running: list[Training] = field(default_factory=list, init=False)

    def run(self) -> Report:
        """Run both trainings, and compare them.

        Raises:
            RunFailedError: one of them failed for another reason than the drill's interruptions.
        """
        try:
            return self._run()
        except BaseException:  # also Ctrl-C: the drill must not leave processes or jobs behind
            for training in self._running:
                training.stop()
            raise

    def _run(self) -> Report:
        overrides = self.overrides
        straight, last = self._straight(overrides)
        needed = enough_steps(self.interruptions, self._reaction_s, _step_s(last))
        if (last.end_step or 0) < needed and not any(_key(word) == STEPS_KEY for word in self.typed):
            self.console.report(f"{last.end_step} steps are over too soon: training {needed} steps instead")
            # by the measured speed: a guess could make drills of slow models last for hours
            shutil.rmtree(straight.path)
            overrides = self._lengthened(overrides, needed)
            straight, last = self._straight(overrides)
        reaction_steps = int(self._reaction_s / max(_step_s(last), 1e-6)) + 1
        plan = Plan(self.interruptions, self.seed, last.end_step or 0, reaction_steps, _first_evaluation(straight))
        interrupted, interruptions = self._interrupted(overrides, plan)
        rows = compare(read_result(straight), read_result(interrupted))
        return Report(straight=straight, interrupted=interrupted, interruptions=tuple(interruptions), rows=tuple(rows))

    def _lengthened(self, overrides: Sequence[str], steps: int) -> list[str]:
        """Return the overrides for a longer training with the same number of evaluations."""
        evaluated_every = math.ceil(steps * EVAL_EVERY_STEPS / STEPS)
        longer = {STEPS_KEY: steps, EVAL_KEY: evaluated_every}
        longer = {key: value for key, value in longer.items() if not any(_key(word) == key for word in self.typed)}
        keys = [_key(word) for word in overrides]
        return [f"{key}={longer[key]}" if key in longer else word for key, word in zip(keys, overrides, strict=True)]

    @property
    def _reaction_s(self) -> float:
        if isinstance(self.config.cluster, Slurm):
            return ON_SLURM_S
        return ONE_PROCESS_S if resources_of(self.config).world_size == 1 else SEVERAL_RANKS_S

    def _straight(self, overrides: Sequence[str]) -> tuple[RunDirectory, Attempt]:
        training = self._launch("straight", overrides)
        began = time.monotonic()
        last = self._finish(training, 1)
        self.console.report(f"straight run: {counted(last.end_step or 0, 'step')} in {time.monotonic() - began:.1f} s")
        return training.directory, last

    def _interrupted(self, overrides: Sequence[str], plan: Plan) -> tuple[RunDirectory, list[Interruption]]:
        training = self._launch("interrupted", overrides)
        interruptions: list[Interruption] = []
        done, attempt = 0, 1
        for number in range(plan.interruptions):
            target = plan.target(done, number)
            if not self._reaches(training, attempt, target):
                break
            how = training.interrupt(plan.signal(number))
            entry = training.end_of(attempt)
            done = entry.end_step or 0
            when = f"interrupted run: {how} after step {target}"
            if entry.reason is Reason.COMPLETED:
                self.console.report(f"{when} came too late, the run was completed")
                break
            assert entry.reason is not None
            interruptions.append(Interruption(how, done, entry.reason))
            self.console.report(f"{when}, stopped after step {done} ({entry.reason})")
            attempt += 1
            training.resume()
        last = self._finish(training, attempt)
        attempts = counted(last.attempt, "attempt")
        self.console.report(f"interrupted run: {counted(last.end_step or 0, 'step')} in {attempts}")
        return training.directory, interruptions

    def _launch(self, name: str, overrides: Sequence[str]) -> Training:
        kind = SubmittedTraining if isinstance(self.config.cluster, Slurm) else LocalTraining
        training = kind(RunDirectory.at(self.home / name), overrides, self.config_dir)
        self._running.append(training)
        training.launch()
        return training

    def _reaches(self, training: Training, attempt: int, step: int) -> bool:
        """Wait until an attempt has completed a step; return whether it got that far."""
        for done in training.steps(attempt):
            self.console.show_step("interrupted run", done)
            if done >= step:
                return True
        return False

    def _finish(self, training: Training, attempt: int) -> Attempt:
        """Wait until the run is completed, even if other causes interrupt it."""
        name = f"{training.directory.path.name} run"
        while True:
            for step in training.steps(attempt):
                self.console.show_step(name, step)
            entry = training.end_of(attempt)
            if entry.reason is Reason.COMPLETED:
                self._running.remove(training)
                return entry
            self.console.report(f"{name}: {entry.reason} after step {entry.end_step}, not by this drill")
            attempt += 1
            training.resume()


def overrides_of(typed: Sequence[str], *, gpus: bool = False) -> list[str]:
    """The overrides with which the trainings of a drill are launched."""
    return [*DEFAULTS, *(ON_GPUS if gpus else ()), *typed, *FORCED]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _first_evaluation(directory: RunDirectory) -> int:
    """The step of the first evaluation that was logged; 0 without one."""
    for found in read_metrics(directory.metrics):
        if is_evaluation(found.values):
            return found.step
    return 0


def _step_s(attempt: Attempt) -> float:
    """Mean seconds per step, after the first; 0 if they weren't measured."""
    steps = (attempt.end_step or 0) - (attempt.start_step or 0)
    return float(attempt.extra.get("train_s", 0.0)) / max(1, steps - 1)
