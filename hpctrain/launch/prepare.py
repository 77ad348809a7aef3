"""The run directory before anything runs: a name that nobody else has, the configuration, the manifest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.checks import check
from hpctrain.config.identity import decides_the_weights, flat
from hpctrain.config.root import Config
from hpctrain.config.stored import OPEN_GROUPS, load, to_yaml
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.files import write_atomic, write_json
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import manifest


def default_path(name: str, clock: float | None = None) -> Path:
    """`runs/NAME/DATE_TIME`; not yet claimed."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(clock))
    return Path("runs") / name / stamp


def claim_default_path(name: str) -> Path:
    """Make `runs/NAME/DATE_TIME`, with a number behind it where another run was faster.

    Raises:
        RunDirectoryError: it can't be made here.
    """
    wanted = default_path(name)
    path, count = wanted, 1
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
            except FileExistsError:
                count += 1
                path = wanted.with_name(f"{wanted.name}_{count}")
            else:
                return path
    except OSError as error:
        raise RunDirectoryError(
            f"run_dir={wanted}: can't be made here ({error.strerror}); set run_dir to a folder that you may write to"
        ) from error


def prepare(config: Config, command: Sequence[str]) -> RunDirectory:
    """Make the run directory of a new run, or take up the one that is there.

    Args:
        config: checked; its `run_dir` is filled in.
        command: the words that were typed, for the manifest.

    Raises:
        ConfigError: the directory holds a run whose weights another configuration decides.
        RunDirectoryError: the directory can't be made, or holds something else.
    """
    if config.run_dir is None:
        assert config.name is not None
        config.run_dir = str(claim_default_path(config.name).absolute())
    directory = RunDirectory.at(config.run_dir)
    config.run_dir = str(directory.path)
    if config.init_from is not None:
        config.init_from = str(Path(config.init_from).absolute())
    if directory.config.exists():
        refuse_other_run(load(directory.config), config)
    elif directory.path.is_dir() and any(directory.path.iterdir()):
        raise RunDirectoryError(
            f"run_dir={directory.path}: the folder holds other files and no run; name an empty or a new one"
        )
    # said once, for this change alone
    config.resume.allow_config_change = False
    directory.create(config.mode)
    if not directory.manifest.exists():
        write_json(directory.manifest, manifest(command, Path.cwd()))
    write_atomic(directory.config, to_yaml(config))
    return directory


def refuse_other_run(old: Config, new: Config) -> None:
    """Let a run go on only with a configuration that leads to the same weights.

    Raises:
        ConfigError: names the keys that changed and may not.
    """
    before, after = flat(old), flat(dataclasses.replace(new, resume=old.resume))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    refused = [key for key in changed if decides_the_weights(key) and not new.resume.allow_config_change]
    if refused:
        key, others = refused[0], refused[1:]
        raise ConfigError(
            key,
            after.get(key),
            f"but the run in {new.run_dir} has {before.get(key)}, and the weights depend on it"
            + (f"; so they do on {', '.join(others)}" if others else ""),
            "choose another run_dir, or set resume.allow_config_change=true",
        )
    for key in changed:
        inexact = "; the run is no longer exact" if decides_the_weights(key) else ""
        print(f"the run goes on with {key}={after.get(key)} instead of {before.get(key)}{inexact}")


def prepare_as_rank(config: Config, command: Sequence[str], environment: ClusterEnvironment) -> RunDirectory:
    """The run directory for ranks that were started by hand; a requeued job finds the one that it made.

    Args:
        config: checked; without a `run_dir`, the job's id names it.
        command: the words that were typed.
        environment: rank zero's.
    """
    if config.run_dir is None and environment.job_id is not None:
        config.run_dir = str(Path("runs") / str(config.name) / f"job_{environment.job_id}")
    return prepare(config, command)


def changed_config(directory: RunDirectory, overrides: Sequence[str], config_dir: str | None) -> Config:
    """A run's configuration with overrides on top; a group may be chosen anew.

    Raises:
        ConfigError: an override that can't work.
    """
    stored = load(directory.config)
    groups = {override.partition("=")[0] for override in overrides if "." not in override.partition("=")[0]}
    typed = {name for name in Config.__dataclass_fields__ if dataclasses.is_dataclass(getattr(stored, name))}
    chosen = groups & {*typed, *OPEN_GROUPS}
    values = [override for override in overrides if override.partition("=")[0].split(".")[0] not in chosen]
    config = load(directory.config, values)
    if chosen:
        from hpctrain.config.compose import Composer

        wanted = [override for override in overrides if override not in values]
        nodes = [f"nodes={config.nodes}"] if "cluster" in chosen else []
        batch = f"trainer.global_batch_size={config.trainer.global_batch_size}"
        composed = Composer(config_dir).compose([*wanted, *nodes, *([] if "trainer" in chosen else [batch])])
        for group in chosen:
            setattr(config, group, getattr(composed, group))
    check(config)
    config.run_dir = str(directory.path)
    return config
