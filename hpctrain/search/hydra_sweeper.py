"""Hydra's sweepers, such as that of Optuna, which choose the runs of a sweep by the results so far."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from hpctrain.config.compose import PRIMARY, Composer, ProgramComposer
from hpctrain.config.overrides import open_overrides
from hpctrain.config.root import Config
from hpctrain.config.task_checks import metric_mode
from hpctrain.errors import ConfigError, ExitCode, RunFailedError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import read_evaluation
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.search.runs import SweepRun, place, without_hydra_overrides
from hpctrain.search.sweep import Sweep, require_one_cluster, sweep_home

PLUGIN_MODULE = "hydra_plugins.hpctrain"
"""The only package from which Hydra instantiates launchers."""
DIRECTIONS = {
    "direction": {"minimize": "min", "maximize": "max"},  # hydra-optuna-sweeper
    "ax_config.experiment.minimize": {"true": "min", "false": "max"},  # hydra-ax-sweeper
    "optim.maximize": {"true": "max", "false": "min"},  # hydra-nevergrad-sweeper
}
"""Keys of sweepers that decide which objectives are better, with the `metric_mode` of each of their values."""


@dataclass(frozen=True, slots=True)
class Direction:
    """Whether a sweeper minimizes or maximizes its objective.

    Attributes:
        key: of its configuration.
        value: of this key.
        mode: `min` or `max`.
    """

    key: str
    value: str
    mode: str


def run_sweeper(composer: Composer, overrides: Sequence[str], command: Sequence[str]) -> int:
    """Let an installed Hydra sweeper, such as Optuna's, choose the runs by the results so far."""
    if isinstance(composer, ProgramComposer):
        problem = "chooses values by the results of hpctrain's own trainings, not of programs"
        raise ConfigError(
            "hydra/sweeper", chosen_sweeper(overrides), problem, "leave it out, and list the values: args.lr=1e-3,1e-4"
        )
    fixed = [override for override in composer.parse(overrides) if not override.is_sweep_override()]
    config = composer.compose(without_hydra_overrides([str(override.input_line) for override in fixed]))
    require_results(config)
    direction = sweeper_direction(composer.sweeper(overrides))
    require_direction(direction, metric_mode(config))
    with sweep_home(config) as home:
        keys = [override.get_key_element() for override in fixed]
        register_launcher(composer, Sweep(home, command), keys, direction)
        where = [f"hydra.sweep.dir='{home.path}'", "hydra.mode=MULTIRUN"]
        try:
            with composer.explaining(overrides):
                composer.application.call(
                    "hydra/sweeper",
                    "multirun",
                    config_name=PRIMARY,
                    task_function=lambda _: None,
                    overrides=[*open_overrides(overrides), *where],
                    with_log_configuration=False,
                )
        except RunFailedError as error:
            raise RunFailedError(f"the sweep ended: {error}") from error
    return ExitCode.FINISHED


def register_launcher(
    composer: Composer, sweep: Sweep, fixed: Collection[str] = (), direction: Direction | None = None
) -> type[Launcher]:
    """Make a launcher for a sweep, and register it with Hydra, which creates it by its name.

    Args:
        composer: of the command line's folders.
        sweep: the sweep to which the runs belong.
        fixed: keys that the command line gives one value.
        direction: which objectives the sweeper takes for better; None if that isn't known.
    """

    class ArrayLauncher(Launcher):
        """Hydra's launcher: launches each batch of runs that a sweeper chose, on SLURM as an array.

        hydra-submitit-launcher has one set of resources for all runs, and loses the errors of ranks.
        """

        def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
            """Ignore Hydra's own configuration: each run is composed like a single run."""

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:  # noqa: ARG002
            """Launch one batch; the sweep numbers the runs, since its folder may hold some of an earlier command.

            Returns:
                Per run: its objective; or an error, which Hydra raises when the sweeper asks for the objective.

            Raises:
                ConfigError: the runs can't return results, or the sweeper takes worse ones for better.
            """
            runs = [SweepRun.compose(composer, overrides, fixed) for overrides in job_overrides]
            for run in runs:
                assert isinstance(run.config, Config)  # `run_sweeper` refuses programs
                require_results(run.config)
                require_direction(direction, metric_mode(run.config))
            require_one_cluster([run.config for run in runs])
            placed = place(runs, sweep.home)
            returns = []
            for run, code, overrides in zip(placed, sweep.launch(placed), job_overrides, strict=True):
                try:
                    best = objective(run.directory, code, direction)
                    returns.append(JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=best))
                except RunFailedError as error:
                    returns.append(JobReturn(overrides=overrides, status=JobStatus.FAILED, _return_value=error))
            return returns

    ArrayLauncher.__module__ = PLUGIN_MODULE
    ArrayLauncher.__qualname__ = ArrayLauncher.__name__
    module = types.ModuleType(PLUGIN_MODULE)
    setattr(module, ArrayLauncher.__name__, ArrayLauncher)
    # a sweeper from another package may have imported `hydra_plugins` already
    sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    sys.modules[PLUGIN_MODULE] = module
    Plugins.instance().register(ArrayLauncher)
    return ArrayLauncher


def sweeper_direction(sweeper: DictConfig) -> Direction | None:
    """Return which objectives a sweeper takes for better; None if its configuration doesn't show it.

    Raises:
        ConfigError: it wants several objectives.
    """
    for key, modes in DIRECTIONS.items():
        direction = OmegaConf.select(sweeper, key)
        if OmegaConf.is_list(direction):
            if len(direction) != 1:
                problem = "names several objectives, but a run has one"
                raise ConfigError(f"hydra.sweeper.{key}", list(direction), problem, "give one direction")
            (direction,) = direction
        name = str(getattr(direction, "name", direction)).lower()
        if name in modes:
            return Direction(key, name, modes[name])
    return None


def require_direction(direction: Direction | None, mode: str | None) -> None:
    """Refuse a sweeper that would look for the worst run.

    Args:
        direction: of the sweeper; None if it isn't known.
        mode: `min` or `max`, of the metric by which the runs are judged; None if it isn't known.

    Raises:
        ConfigError: they differ.
    """
    if direction is None or mode is None or direction.mode == mode:
        return
    target, better = ("higher", "lower") if mode == "min" else ("lower", "higher")
    problem = f"looks for {target} values, but {better} values of the runs' metric are better"
    opposite = next(value for value in DIRECTIONS[direction.key] if value != direction.value)
    remedy = f"set it to {opposite}, or change checkpoint.metric and checkpoint.metric_mode"
    raise ConfigError(f"hydra.sweeper.{direction.key}", direction.value, problem, remedy)


def require_results(config: Config) -> None:
    """Refuse to launch runs for a sweeper without their results.

    Raises:
        ConfigError: the runs are submitted and not waited for, or not launched at all.
    """
    if config.cluster.dry_run:
        problem = "can't preview a sweeper that chooses values by the results of runs"
        raise ConfigError("cluster.dry_run", "true", problem, "leave out -m and hydra/sweeper to see one run")
    if config.cluster.kind != "local" and not config.cluster.wait:
        problem = "the sweeper chooses values by the results of runs, so the command has to wait for them"
        raise ConfigError("cluster.wait", "false", problem, "add cluster.wait=true")


def objective(directory: RunDirectory, code: int, direction: Direction | None) -> float:
    """Return the best value of the metric by which a run is judged.

    Args:
        directory: of the run.
        code: its exit code.
        direction: of the sweeper; None if it isn't known.

    Raises:
        RunFailedError: the run didn't finish, still trains, or wasn't evaluated.
        ConfigError: the sweeper takes worse values for better.
    """
    if code != ExitCode.FINISHED:
        logs = f"python -m hpctrain logs {directory.as_typed}"
        raise RunFailedError(f"{directory.as_typed} ended with exit code {int(code)}; its log: {logs}")
    attempts = Ledger(directory).attempts()
    if not attempts or attempts[-1].reason is not Reason.COMPLETED:
        remedy = "type the command again once it has completed"
        raise RunFailedError(f"{directory.as_typed} is still queued or running, by another command; {remedy}")
    evaluation = directory.newest(read_evaluation)
    if evaluation is None or evaluation.best is None:
        remedy = "give the task an eval_dataset, and checkpoint.metric_mode if the metric isn't its own"
        raise RunFailedError(f"{directory.as_typed} has no value of the metric by which it is judged; {remedy}")
    require_direction(direction, evaluation.best.mode)
    return evaluation.best.value


def chosen_sweeper(overrides: Sequence[str]) -> str:
    """The sweeper as it was typed; a site's configuration may choose it, too."""
    pairs = [override.partition("=") for override in overrides]
    return next((value for key, _, value in reversed(pairs) if key.lstrip("+") == "hydra/sweeper"), "of the site")
