"""The objective of a sweeper that chooses values by results: the metric by which a run is judged."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from hpctrain.config.metric import may_have_mode
from hpctrain.config.root import Config
from hpctrain.config.task_methods import may_be_evaluated
from hpctrain.errors import ConfigError, ExitCode, RunFailedError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import last_evaluation

DIRECTIONS = {"minimize": "min", "maximize": "max"}
"""The values of `direction` of hydra-optuna-sweeper, and what `metric_mode` calls them."""
OPPOSITES = {"minimize": "maximize", "maximize": "minimize"}
FLAGS = {"ax_config.experiment.minimize": ("max", "min"), "optim.maximize": ("min", "max")}
"""Flags of hydra-ax-sweeper and hydra-nevergrad-sweeper, and the modes that false and true mean."""


@dataclass(frozen=True, slots=True)
class Direction:
    """Which objectives a sweeper takes for better.

    Attributes:
        key: of its configuration, in full.
        value: of this key.
        opposite: the value with which the sweeper would look for the others.
        mode: `min` or `max`.
    """

    key: str
    value: str
    opposite: str
    mode: str


def sweeper_direction(sweeper: DictConfig) -> Direction | None:
    """Return which objectives a sweeper takes for better; None if its configuration doesn't show it.

    Raises:
        ConfigError: it wants several objectives.
    """
    direction = OmegaConf.select(sweeper, "direction")
    if OmegaConf.is_list(direction):
        if len(direction) != 1:
            problem = "names several objectives, but a run has one"
            raise ConfigError("hydra.sweeper.direction", list(direction), problem, "give one direction")
        (direction,) = direction
    if direction is not None:
        name = str(getattr(direction, "name", direction)).lower()
        if name not in DIRECTIONS:
            return None
        return Direction("hydra.sweeper.direction", name, OPPOSITES[name], DIRECTIONS[name])
    for key, (if_false, if_true) in FLAGS.items():
        flag = OmegaConf.select(sweeper, key)
        if isinstance(flag, bool):
            value, opposite = ("true", "false") if flag else ("false", "true")
            return Direction(f"hydra.sweeper.{key}", value, opposite, if_true if flag else if_false)
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
    wanted, better = ("higher", "lower") if mode == "min" else ("lower", "higher")
    problem = f"looks for {wanted} values, but {better} values of the runs' metric are better"
    remedy = f"set it to {direction.opposite}, or change checkpoint.metric and checkpoint.metric_mode"
    raise ConfigError(direction.key, direction.value, problem, remedy)


def require_metric(kind: str, config: Config) -> None:
    """Refuse a search that could rank none of its runs.

    Args:
        kind: of the search, as `sweep` names it.
        config: of one of its runs.

    Raises:
        ConfigError: the task has nothing to evaluate on, or nothing defines which values of its metric are better.
    """
    if not may_be_evaluated(config):
        problem = f"ranks runs by their evaluations, but the task {config.task['_target_']} has no eval_dataset"
        raise ConfigError("sweep", kind, problem, "define eval_dataset(self), or use sweep=random")
    if not may_have_mode(config):
        problem = "is not the task's own metric, and nothing defines whether lower or higher values are better"
        remedy = "check its name, and add checkpoint.metric_mode=min or checkpoint.metric_mode=max"
        raise ConfigError("checkpoint.metric", config.checkpoint.metric, problem, remedy)


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
        RunFailedError: the run didn't finish, or wasn't evaluated.
        ConfigError: the sweeper takes worse values for better.
    """
    if code != ExitCode.FINISHED:
        logs = f"python -m hpctrain logs {directory.as_typed}"
        raise RunFailedError(f"{directory.as_typed} ended with exit code {int(code)}; its log: {logs}")
    found = last_evaluation(directory)
    if found is None or found.best is None:
        remedy = "give the task an eval_dataset, and checkpoint.metric_mode if the metric isn't its own"
        raise RunFailedError(f"{directory.as_typed} has no value of the metric by which it is judged; {remedy}")
    require_direction(direction, found.best.mode)
    return found.best.value
