"""A drill of any program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.resources import resources_of
from hpctrain.config.root import ProgramConfig
from hpctrain.drill.comparison import ComparisonRow, compare_last_saves, compare_metrics, compare_values
from hpctrain.drill.drill import FORCED, Drill, Plan, Report, TimePlan, duration_s, steps_in, unproven
from hpctrain.drill.launched_run import LaunchedRun
from hpctrain.errors import RunFailedError
from hpctrain.phrases import listed
from hpctrain.results.run_comparison import logged_metrics
from hpctrain.run.code import current_code, read_files
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Attempt, Ledger
from hpctrain.run.saves import last_save

ON_GPUS = (
    "cluster.env.CUBLAS_WORKSPACE_CONFIG=:4096:8",
    "cluster.env.NCCL_ALGO=Ring",
    "cluster.env.NCCL_PROTO=Simple",
)
"""Without the first, no program with cuBLAS is deterministic; from three GPUs on, the others fix the order of sums."""
LOCAL_S = 2.0
"""Seconds from an interruption to the last step on this machine; steps without metrics are recorded once a second."""
ON_SLURM_S = 3.5
"""Seconds from an interruption to the last step on SLURM."""
LOGS = ("straight.log", "interrupted.log")
"""Names of the logs of both launches; see `LaunchedRun`."""
REMEDY = "let the program run for longer, or save more often"


@dataclass(kw_only=True)
class ProgramDrill(Drill):
    """A drill of a program.

    Args:
        command: the program and its arguments.
        tolerance: the largest relative difference that is accepted.
        ignored: patterns of the names of metrics and tensors that may differ.
    """

    command: Sequence[str]
    tolerance: float
    ignored: Sequence[str]

    def _run(self) -> Report:
        words = ["run", *self._options, *self.overrides, "--", *self.command]
        run, last = self._run_straight(words)
        straight = run.directory
        self._refuse_shared_save(straight)
        interrupted, interruptions = self._run_interrupted(words, self._plan(run, last))
        saves = compare_last_saves(straight, interrupted, self.ignored)
        metrics = [logged_metrics(directory, self.ignored) for directory in (straight, interrupted)]
        return Report(
            straight=straight,
            interrupted=interrupted,
            interruptions=interruptions,
            rows=(*_compare_steps(straight, interrupted), *saves.rows, *compare_metrics(*metrics)),
            notes=(*saves.notes, *changed_code(straight, interrupted)),
            tolerance=self.tolerance,
            unproven=unproven(interruptions, REMEDY) or saves.unproven,
        )

    def _plan(self, run: LaunchedRun, last: Attempt) -> Plan | TimePlan:
        if not last.end_step:
            return TimePlan(self.interruptions, self.seed, duration_s(run.directory), run.latest.first_save_s)
        reaction_steps = steps_in(ON_SLURM_S if self.on_slurm else LOCAL_S, last)
        return Plan(self.interruptions, self.seed, last.end_step, reaction_steps)

    def _refuse_shared_save(self, straight: RunDirectory) -> None:
        """Refuse a program whose second run would continue from the save of its first."""
        save = last_save(straight)
        if save is not None and not save.path.resolve().is_relative_to(self.home.resolve()):
            raise RunFailedError(
                f"the program saves to {save.path}, from which the interrupted run would continue: let it write into "
                "the folder HPCTRAIN_CHECKPOINT_DIR, which each run has its own of"
            )


def overrides_of(user_overrides: Sequence[str], config: ProgramConfig | None = None) -> list[str]:
    """The overrides with which the runs of a drill are launched.

    Args:
        user_overrides: by the user.
        config: composed from these overrides; None before it is.
    """
    if config is None:
        return [*user_overrides, *FORCED]
    gpus = ON_GPUS if resources_of(config).gpus_per_node != 0 else ()
    # in a folder inside of the code, the second run would copy what the drill wrote of the first
    names = ",".join(_quoted(pattern) for pattern in (*config.code.exclude, *LOGS))
    # otherwise the second run would find what the first one wrote into an ignored `outputs/`
    cwd = ["run.cwd=own"] if config.run.cwd is None and config.code.snapshot != "none" else []
    return [*gpus, *cwd, *user_overrides, *FORCED, f"code.exclude=[{names}]"]


def _quoted(pattern: str) -> str:
    """Quote a text for Hydra's grammar."""
    return "'" + pattern.replace("'", "\\'") + "'"


def changed_code(straight: RunDirectory, interrupted: RunDirectory) -> list[str]:
    """Name the files that were edited, added or removed between the two launches, in one remark or none.

    A remark alone: outside of git, a log in the working directory is one of them.
    """
    codes = [current_code(directory) for directory in (straight, interrupted)]
    straight_files, interrupted_files = (set() if code is None else set(read_files(code.list)) for code in codes)
    names = sorted({file.path for file in straight_files ^ interrupted_files})
    return [f"the code was changed between the two launches: {listed(names)}"] if names else []


def _compare_steps(straight: RunDirectory, interrupted: RunDirectory) -> list[ComparisonRow]:
    """Compare the numbers of steps, if they were reported."""
    runs = [Ledger(run).attempts() for run in (straight, interrupted)]
    steps = [max((attempt.end_step or 0 for attempt in attempts), default=0) for attempts in runs]
    return [compare_values("steps", *steps)] if any(steps) else []
