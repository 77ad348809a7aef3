"""`-m`: compose and check every run of a sweep, then launch them, or let a sweeper such as Optuna's choose them."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Sequence

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hpctrain.config.compose import PRIMARY, Composer, open_overrides
from hpctrain.config.root import Config
from hpctrain.config.several import NOT_SWEPT, value_as_typed
from hpctrain.errors import ConfigError, ExitCode, RunFailedError
from hpctrain.launch.prepare import claim_default_path, default_path
from hpctrain.run.directory import RunDirectory
from hpctrain.status.metrics import read_metrics
from hpctrain.sweep.expand import expand
from hpctrain.sweep.progress import progressing
from hpctrain.sweep.sweep import Sweep, require_one_cluster

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
PLUGIN_MODULE = "hydra_plugins.hpctrain"
"""The only package from which Hydra instantiates launchers."""
OBJECTIVE = "eval/loss"
"""The metric whose last value an optimising sweeper receives."""


def multirun(composer: Composer, overrides: Sequence[str], command: Sequence[str]) -> int:
    """Launch a sweep.

    Args:
        composer: of the command line's folders.
        overrides: with comma-separated values, ranges and so on, as Hydra's sweeper takes them.
        command: the command line as typed.

    Returns:
        An `ExitCode`: 0 if all runs finished or were submitted, else that of the first run that didn't finish.

    Raises:
        ConfigError: a run's configuration is invalid; nothing is launched or written then.
    """
    _refuse_swept(composer, overrides)
    sweeper = composer.sweeper(overrides)
    if sweeper.get("_target_") != BASIC:
        return _run_sweeper(composer, overrides, command)
    # in place of Hydra's basic sweeper, which would launch batch by batch, and write its own files
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    with composer.explaining(overrides):
        jobs = expand(composer.parse([*params, *overrides]))
    configs = [composer.compose(without_hydra_overrides(job)) for job in progressing(jobs, "composed")]
    require_one_cluster(configs)
    codes = Sweep(_home(configs[0]), command).launch(configs)
    return next((code for code in codes if code != ExitCode.FINISHED), ExitCode.FINISHED)


class ArrayLauncher(Launcher):
    """Hydra's launcher: launches each batch of runs that a sweeper chose, on SLURM as an array.

    Attributes:
        composer: of the command line's folders.
        sweep: the sweep to which the runs belong.
    """

    composer: Composer
    sweep: Sweep

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Ignore Hydra's own configuration: each run is composed like a single run."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Launch one batch.

        Returns:
            Per run: its last evaluation loss if the run has ended, else None.
        """
        configs = [self.composer.compose(without_hydra_overrides(overrides)) for overrides in job_overrides]
        require_one_cluster(configs)
        codes = self.sweep.launch(configs, initial_job_idx)
        has_ended = configs[0].cluster.wait or configs[0].cluster.kind == "local"
        returns = []
        for place, overrides in enumerate(job_overrides):
            number = initial_job_idx + place
            # after Ctrl-C the runs that weren't started have no code
            code = codes[place] if place < len(codes) else ExitCode.INTERRUPTED
            value: object = last_objective(self.sweep.run_directory(number)) if has_ended else None
            status = JobStatus.COMPLETED
            if code != ExitCode.FINISHED:
                status = JobStatus.FAILED
                value = RunFailedError(f"run {number} ended with exit code {int(code)}")
            returns.append(JobReturn(overrides=overrides, status=status, _return_value=value))
        return returns


def register_launcher(composer: Composer, sweep: Sweep) -> type[ArrayLauncher]:
    """Make a launcher for this sweep, and register it with Hydra, which creates it by its name."""
    made = type("ArrayLauncher", (ArrayLauncher,), {"__module__": PLUGIN_MODULE, "composer": composer, "sweep": sweep})
    module = types.ModuleType(PLUGIN_MODULE)
    setattr(module, made.__name__, made)
    # a sweeper from another package may have imported `hydra_plugins` already
    sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    sys.modules[PLUGIN_MODULE] = module
    Plugins.instance().register(made)
    return made


def without_hydra_overrides(overrides: Sequence[str]) -> list[str]:
    """Leave out the overrides that configure Hydra."""
    return [override for override in overrides if not override.lstrip("+~").startswith("hydra")]


def last_objective(directory: RunDirectory) -> float | None:
    """The run's last evaluation loss; None if there is none, or it isn't finite."""
    losses = [record.values[OBJECTIVE] for record in read_metrics(directory.metrics) if OBJECTIVE in record.values]
    return losses[-1] if losses and math.isfinite(losses[-1]) else None


def _refuse_swept(composer: Composer, overrides: Sequence[str]) -> None:
    for override in composer.parse(overrides):
        key = override.key_or_group
        if key in NOT_SWEPT and override.is_sweep_override():
            raise ConfigError(key, value_as_typed(override), "can't be swept over", NOT_SWEPT[key])


def _home(config: Config) -> RunDirectory:
    assert config.name is not None
    if config.run_dir is not None:
        return RunDirectory.at(config.run_dir)
    if config.cluster.dry_run:
        return RunDirectory.at(default_path(config.name))
    home = RunDirectory.at(claim_default_path(config.name))
    home.create_for_sweep(config.mode)  # here, because a sweeper may write into it before the first launch
    return home


def _run_sweeper(composer: Composer, overrides: Sequence[str], command: Sequence[str]) -> int:
    """Let an installed Hydra sweeper, such as Optuna's, choose the runs by the losses so far."""
    plain = [str(override.input_line) for override in composer.parse(overrides) if not override.is_sweep_override()]
    home = _home(composer.compose(without_hydra_overrides(plain)))
    register_launcher(composer, Sweep(home, command))
    where = [f"hydra.sweep.dir='{home.path}'", "hydra.mode=MULTIRUN"]
    try:
        with composer.explaining(overrides):
            composer.hydra.multirun(
                config_name=PRIMARY,
                task_function=lambda _: None,
                overrides=[*open_overrides(overrides), *where],
                with_log_configuration=False,
            )
    except RunFailedError as error:
        raise RunFailedError(f"the sweep ended: {error}") from error
    return ExitCode.FINISHED
