"""The objective of a sweeper that chooses values by results: the metric by which a run is judged."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from hpctrain.config.metric import may_have_mode
from hpctrain.config.root import Config
from hpctrain.config.task_methods import may_be_evaluated
from hpctrain.errors import ConfigError, ExitCode, RunFailedError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import last_evaluation

DIRECTIONS = {"minimize": "min", "maximize": "max"}
"""The values of `direction` of hydra-optuna-sweeper, and what `metric_mode` calls them."""
FLAGS = {"ax_config.experiment.minimize": ("max", "min"), "optim.maximize": ("min", "max")}
"""Flags of hydra-ax-sweeper and hydra-nevergrad-sweeper, and the modes that false and true mean."""


def sweeper_mode(sweeper: DictConfig) -> str | None:
    """Return which objectives a sweeper takes for better, `min` or `max`; None if its configuration doesn't show it.

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
        return DIRECTIONS.get(str(getattr(direction, "name", direction)).lower())
    for key, (if_false, if_true) in FLAGS.items():
        flag = OmegaConf.select(sweeper, key)
        if isinstance(flag, bool):
            return if_true if flag else if_false
    return None


def require_direction(sweepers: str | None, metrics: str | None) -> None:
    """Refuse a sweeper that would look for the worst run.

    Args:
        sweepers: mode of the sweeper, `min` or `max`; None if it isn't known.
        metrics: mode of the metric by which the runs are judged; None if it isn't known.

    Raises:
        ConfigError: they differ.
    """
    if sweepers is None or metrics is None or sweepers == metrics:
        return
    words = {mode: word for word, mode in DIRECTIONS.items()}
    better = {"min": "lower", "max": "higher"}[metrics]
    problem = f"but {better} values of the runs' metric are better"
    remedy = (
        f"set the sweeper to {words[metrics]}, or checkpoint.metric and checkpoint.metric_mode to what it looks for"
    )
    raise ConfigError("hydra.sweeper.direction", words[sweepers], problem, remedy)


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


def objective(directory: RunDirectory, code: int, mode: str | None) -> float:
    """Return the best value of the metric by which a run is judged.

    Args:
        directory: of the run.
        code: its exit code.
        mode: of the sweeper; None if it isn't known.

    Raises:
        RunFailedError: the run didn't finish, or wasn't evaluated.
        ConfigError: the sweeper takes worse values for better.
    """
    if code != ExitCode.FINISHED:
        raise RunFailedError(f"run {directory.path.name} ended with exit code {int(code)}")
    found = last_evaluation(directory)
    if found is None or found.best is None:
        remedy = "give the task an eval_dataset, and checkpoint.metric_mode if the metric isn't its own"
        raise RunFailedError(
            f"run {directory.path.name} has no value of the metric that ranks its evaluations; {remedy}"
        )
    require_direction(mode, found.best.mode)
    return found.best.value
