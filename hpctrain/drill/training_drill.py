"""A drill of one of hpctrain's own trainings."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.logger import SERVICES
from hpctrain.config.resources import resources_of
from hpctrain.config.root import Config
from hpctrain.drill.comparison import compare, read_result
from hpctrain.drill.drill import FORCED, Drill, Plan, Report, enough_steps, step_s, steps_in, unproven
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import is_evaluation
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
    *(f"logger.{name}.enabled=false" for name in SERVICES),
    "logger.samples=true",
)
"""The overrides of every drill; the user's own come after them."""
NO_PAUSE = ("trainer.pause_at_step=null",)
"""A run that pauses would wait until a user resumes it."""
ON_GPUS = (
    "trainer.deterministic=true",
    "trainer.cudnn_benchmark=false",
    "cluster.env.CUBLAS_WORKSPACE_CONFIG=:4096:8",
)
"""cuBLAS is deterministic only with a workspace of a fixed size."""
ONE_PROCESS_S = 0.15
"""Seconds from an interruption to the last step of an attempt, with one process."""
SEVERAL_RANKS_S = 1.5
"""Seconds from an interruption to the last step with several ranks, which agree on a stop at least once a second."""
ON_SLURM_S = 2.5
"""Seconds from an interruption to the last step on SLURM."""


@dataclass(kw_only=True)
class TrainingDrill(Drill):
    """A drill of a training.

    Args:
        config: of its trainings.
        user_overrides: the overrides that the user typed.
    """

    config: Config
    user_overrides: Sequence[str]

    def _run(self) -> Report:
        overrides = self.overrides
        run, last = self._run_straight([*self._options, *overrides])
        needed = enough_steps(self.interruptions, self._reaction_s, step_s(last))
        if (last.end_step or 0) < needed and not any(_key(word) == STEPS_KEY for word in self.user_overrides):
            self.console.report(f"{last.end_step} steps are over too soon: training {needed} steps instead")
            # by the measured speed: a guess could make drills of slow models last for hours
            shutil.rmtree(run.directory.path)
            overrides = self._lengthened(overrides, needed)
            run, last = self._run_straight([*self._options, *overrides])
        straight = run.directory
        reaction_steps = steps_in(self._reaction_s, last)
        plan = Plan(self.interruptions, self.seed, last.end_step or 0, reaction_steps, _first_evaluation(straight))
        interrupted, interruptions = self._run_interrupted([*self._options, *overrides], plan)
        return Report(
            straight=straight,
            interrupted=interrupted,
            interruptions=interruptions,
            rows=tuple(compare(read_result(straight), read_result(interrupted))),
            unproven=unproven(interruptions, f"train for longer with {STEPS_KEY}"),
        )

    def _lengthened(self, overrides: Sequence[str], steps: int) -> list[str]:
        """Return the overrides for a longer training with the same number of evaluations."""
        evaluated_every = math.ceil(steps * EVAL_EVERY_STEPS / STEPS)
        longer = {STEPS_KEY: steps, EVAL_KEY: evaluated_every}
        for key in map(_key, self.user_overrides):
            longer.pop(key, None)
        keys = [_key(word) for word in overrides]
        return [f"{key}={longer[key]}" if key in longer else word for key, word in zip(keys, overrides, strict=True)]

    @property
    def _reaction_s(self) -> float:
        if self.on_slurm:
            return ON_SLURM_S
        return ONE_PROCESS_S if resources_of(self.config).world_size == 1 else SEVERAL_RANKS_S


def overrides_of(user_overrides: Sequence[str], *, gpus: bool = False) -> list[str]:
    """The overrides with which the trainings of a drill are launched."""
    return [*DEFAULTS, *(ON_GPUS if gpus else ()), *user_overrides, *FORCED, *NO_PAUSE]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _first_evaluation(directory: RunDirectory) -> int:
    """The step of the first evaluation that was logged; 0 without one."""
    for record in read_metrics(directory.metrics):
        if is_evaluation(record.values):
            return record.step
    return 0
