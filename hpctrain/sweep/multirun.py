"""`-m`: compose and check every run of a sweep, then launch them, or let a sweeper such as Optuna's choose them."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Collection, Iterator, Sequence

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from hpctrain.config.compose import PRIMARY, Composer
from hpctrain.config.compose_program import ProgramComposer
from hpctrain.config.compose_sweep import SweepComposer, split_sweep
from hpctrain.config.metric import metric_mode
from hpctrain.config.multiple_values import NOT_SWEPT, value_as_typed
from hpctrain.config.overrides import open_overrides
from hpctrain.config.root import Config
from hpctrain.config.run_config import RunConfig
from hpctrain.config.sweep import Grid
from hpctrain.errors import ConfigError, ExitCode, RunFailedError
from hpctrain.launch.prepare import default_path, undone_on_error
from hpctrain.run.directory import RunDirectory
from hpctrain.sweep.found_runs import find_runs
from hpctrain.sweep.launch_search import launch_found, refuse_other_sweep
from hpctrain.sweep.objective import Direction, objective, require_direction, require_results, sweeper_direction
from hpctrain.sweep.recorded import record_of
from hpctrain.sweep.runs import place
from hpctrain.sweep.sweep import Sweep, require_one_cluster
from hpctrain.sweep.sweep_run import sweep_run, without_hydra_overrides

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
PLUGIN_MODULE = "hydra_plugins.hpctrain"
"""The only package from which Hydra instantiates launchers."""


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
    own, overrides = split_sweep(overrides)
    # most sweeps are grids without keys of their own, and composing takes a tenth of a second
    search = SweepComposer(composer.config_dir).compose_sweep(own) if own else Grid()
    _refuse_swept(composer, overrides)
    sweeper = composer.sweeper(overrides)
    if sweeper.get("_target_") != BASIC:
        if own:
            remedy = f"leave out {own[0]}, or the sweeper"
            raise ConfigError(
                "hydra/sweeper", _chosen(overrides), "a sweeper of Hydra finds the runs by itself", remedy
            )
        return _run_sweeper(composer, overrides, command)
    # in place of Hydra's basic sweeper, which would launch batch by batch, and write its own files
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    with composer.explaining(overrides):
        parsed = composer.parse([*params, *overrides])
        found = find_runs(composer, record_of(composer, search, parsed, command), parsed)
    require_one_cluster([run.config for run in found.runs])
    with _home(found.runs[0].config) as home:
        refuse_other_sweep(home, found.record)
        codes = launch_found(Sweep(home, command, record=found.record), found)
    return next((code for code in codes if code != ExitCode.FINISHED), ExitCode.FINISHED)


class ArrayLauncher(Launcher):
    """Hydra's launcher: launches each batch of runs that a sweeper chose, on SLURM as an array.

    Attributes:
        composer: of the command line's folders.
        sweep: the sweep to which the runs belong.
        fixed: keys that the command line gives one value.
        direction: which objectives the sweeper takes for better; None if that isn't known.
    """

    composer: Composer
    sweep: Sweep
    fixed: Collection[str] = ()
    direction: Direction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Ignore Hydra's own configuration: each run is composed like a single run."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:  # noqa: ARG002
        """Launch one batch; the sweep numbers the runs, since its folder may hold some of an earlier command.

        Returns:
            Per run: its objective; or an error, which Hydra raises when the sweeper asks for the objective.

        Raises:
            ConfigError: the runs can't return results, or the sweeper takes worse ones for better.
        """
        runs = [sweep_run(self.composer, overrides, self.fixed) for overrides in job_overrides]
        for run in runs:
            assert isinstance(run.config, Config)  # `_run_sweeper` refuses programs
            require_results(run.config)
            require_direction(self.direction, metric_mode(run.config))
        require_one_cluster([run.config for run in runs])
        placed = place(runs, self.sweep.home)
        codes = self.sweep.launch(placed)
        return [
            self._returned(run.directory, code, overrides)
            for run, code, overrides in zip(placed, codes, job_overrides, strict=True)
        ]

    def _returned(self, directory: RunDirectory, code: int, overrides: Sequence[str]) -> JobReturn:
        try:
            value, status = objective(directory, code, self.direction), JobStatus.COMPLETED
        except RunFailedError as error:
            return JobReturn(overrides=overrides, status=JobStatus.FAILED, _return_value=error)
        return JobReturn(overrides=overrides, status=status, _return_value=value)


def register_launcher(
    composer: Composer, sweep: Sweep, fixed: Collection[str] = (), direction: Direction | None = None
) -> type[ArrayLauncher]:
    """Make a launcher for this sweep, and register it with Hydra, which creates it by its name."""
    fields = {"composer": composer, "sweep": sweep, "fixed": fixed, "direction": direction}
    made = type("ArrayLauncher", (ArrayLauncher,), {"__module__": PLUGIN_MODULE, **fields})
    module = types.ModuleType(PLUGIN_MODULE)
    setattr(module, made.__name__, made)
    # a sweeper from another package may have imported `hydra_plugins` already
    sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    sys.modules[PLUGIN_MODULE] = module
    Plugins.instance().register(made)
    return made


def _refuse_swept(composer: Composer, overrides: Sequence[str]) -> None:
    for override in composer.parse(overrides):
        key = override.key_or_group
        if key in NOT_SWEPT and override.is_sweep_override():
            raise ConfigError(key, value_as_typed(override), "can't be swept over", NOT_SWEPT[key])


def _chosen(overrides: Sequence[str]) -> str:
    """The sweeper as it was typed; a site's configuration may choose it, too."""
    typed = [override.partition("=") for override in overrides]
    return next((value for key, _, value in reversed(typed) if key.lstrip("+") == "hydra/sweeper"), "of the site")


@contextlib.contextmanager
def _home(config: RunConfig) -> Iterator[RunDirectory]:
    """The sweep's directory; an error inside the context leaves it as it was, or absent."""
    if config.cluster.dry_run:
        yield RunDirectory.at(config.run_dir or default_path(str(config.name)))
        return
    with undone_on_error(config.run_dir, config.name) as home:
        if config.run_dir is None:
            home.create_for_sweep(config.mode)  # here, because a sweeper may write into it before the first launch
        yield home


def _run_sweeper(composer: Composer, overrides: Sequence[str], command: Sequence[str]) -> int:
    """Let an installed Hydra sweeper, such as Optuna's, choose the runs by the results so far."""
    if isinstance(composer, ProgramComposer):
        problem = "chooses values by the results of hpctrain's own trainings, not of programs"
        raise ConfigError(
            "hydra/sweeper", _chosen(overrides), problem, "leave it out, and list the values: args.lr=1e-3,1e-4"
        )
    fixed = [override for override in composer.parse(overrides) if not override.is_sweep_override()]
    config = composer.compose(without_hydra_overrides([str(override.input_line) for override in fixed]))
    require_results(config)
    direction = sweeper_direction(composer.sweeper(overrides))
    require_direction(direction, metric_mode(config))
    with _home(config) as home:
        keys = [override.get_key_element() for override in fixed]
        register_launcher(composer, Sweep(home, command), keys, direction)
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
