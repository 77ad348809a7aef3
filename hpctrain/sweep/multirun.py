"""``-m``: every run is composed and checked before the first one is launched."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.types import RunMode

from hpctrain.config.compose import PRIMARY, Composer, open_overrides
from hpctrain.config.root import Config
from hpctrain.errors import ConfigError, ExitCode, RunFailedError
from hpctrain.launch.prepare import claim_default_path, default_path
from hpctrain.run.directory import RunDirectory
from hpctrain.sweep.batch import Sweep, refuse_mixed
from hpctrain.sweep.launcher import ArrayLauncher, own, register

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
ONE_FOR_ALL = ("cluster", "cluster.kind", "cluster.wait", "cluster.dry_run", "run_dir")
"""Keys that say how the sweep itself is launched."""


def multirun(composer: Composer, overrides: Sequence[str], command: Sequence[str]) -> int:
    """Launch a sweep.

    Args:
        composer: of the command line's folders.
        overrides: with comma-separated values, ranges and so on, as Hydra's sweeper takes them.
        command: the words that were typed.

    Returns:
        An `ExitCode`: 0 when all runs finished or were submitted, else that of the first that didn't finish.

    Raises:
        ConfigError: a run that can't work; nothing is launched or written then.
    """
    _refuse_swept(composer, overrides)
    with composer.explaining(overrides):
        node = composer.hydras(open_overrides(overrides), RunMode.MULTIRUN)
    sweeper = node.hydra.sweeper
    if sweeper.get("_target_") != BASIC:
        return _by_sweeper(composer, list(overrides), command)
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    with composer.explaining(overrides):
        (jobs,) = BasicSweeper.split_arguments(composer.parse([*params, *overrides]), None)
    configs = [composer.compose(own(job)) for job in jobs]
    refuse_mixed(configs)
    codes = Sweep(_home(configs[0]), command).launch(configs)
    return next((code for code in codes if code != ExitCode.FINISHED), ExitCode.FINISHED)


def _refuse_swept(composer: Composer, overrides: Sequence[str]) -> None:
    for override in composer.parse(overrides):
        key = override.key_or_group
        if key in ONE_FOR_ALL and override.is_sweep_override():
            values = str(override.input_line).partition("=")[2]
            remedy = "runs are RUN_DIR/0, RUN_DIR/1, ..." if key == "run_dir" else "type one command for each"
            raise ConfigError(key, values, "can't be swept over", remedy)


def _home(config: Config) -> RunDirectory:
    assert config.name is not None
    if config.run_dir is not None:
        return RunDirectory.at(config.run_dir)
    return RunDirectory.at(default_path(config.name) if config.cluster.dry_run else claim_default_path(config.name))


def _by_sweeper(composer: Composer, overrides: list[str], command: Sequence[str]) -> int:
    """Hand over to a sweeper that was installed beside Hydra, such as Optuna's; it learns the runs' losses."""
    plain = [str(override.input_line) for override in composer.parse(overrides) if not override.is_sweep_override()]
    first = composer.compose(own(plain))
    home = _home(first)
    register()
    ArrayLauncher.composer, ArrayLauncher.sweep = composer, Sweep(home, command)
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
