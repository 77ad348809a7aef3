"""A run before anything is launched: its directory, its resources, its stored configuration."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.checks import check
from hpctrain.config.cluster import Slurm
from hpctrain.config.identity import decides_the_weights, flat
from hpctrain.config.resources import Resources, resources_of
from hpctrain.config.root import Config, with_absolute_init
from hpctrain.config.stored import OPEN_GROUPS, load, to_yaml
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.files import write_json
from hpctrain.run.config_change import change_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import manifest


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run to launch: everything that follows from its configuration, derived once.

    Attributes:
        config: of the run, with its `run_dir`.
        directory: of the run.
        resources: of the run.
    """

    config: Config
    directory: RunDirectory
    resources: Resources

    @property
    def slurm(self) -> Slurm:
        """The keys of cluster=slurm, for code that runs only there."""
        assert isinstance(self.config.cluster, Slurm)
        return self.config.cluster


def plan(config: Config) -> RunPlan:
    """Plan a run without writing anything.

    Args:
        config: checked; without a `run_dir`, the plan names the default one, which isn't claimed.
    """
    assert config.name is not None
    directory = RunDirectory.at(config.run_dir or default_path(config.name))
    return RunPlan(dataclasses.replace(config, run_dir=str(directory.path)), directory, resources_of(config))


def prepare(
    config: Config,
    command: Sequence[str],
    varied: Mapping[str, str] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> RunPlan:
    """Create the directory of a new run, or open an existing run's, and store the configuration.

    Args:
        config: checked.
        command: the words that were typed, for the manifest.
        varied: the keys that a sweep varies, with this run's values, for the manifest.
        origin: the manifest, if the caller has made it already.

    Returns:
        The plan of the run, whose directory exists.

    Raises:
        ConfigError: the directory holds a run, and this configuration would change its weights.
        RunDirectoryError: the directory can't be created, or holds other files.
    """
    if config.run_dir is None:
        assert config.name is not None
        config = dataclasses.replace(config, run_dir=str(claim_default_path(config.name)))
    run = plan(with_absolute_init(config))
    directory = run.directory
    if directory.config.exists():
        refuse_other_run(load(directory.config), run.config)
    elif directory.path.is_dir() and any(directory.path.iterdir()):
        raise RunDirectoryError(
            f"run_dir={directory.path}: expected a run or an empty folder, found other files; name an empty or new one"
        )
    # allow_config_change was given for this change alone, not for those of later resumes
    stored = dataclasses.replace(run.config, resume=dataclasses.replace(config.resume, allow_config_change=False))
    directory.create(config.mode)
    with directory.permissions():
        if not directory.manifest.exists():
            known = origin or manifest(command, Path.cwd())
            write_json(directory.manifest, {**known, "varied": dict(varied or {})})
        change_config(directory, to_yaml(stored))
    return dataclasses.replace(run, config=stored)


def prepare_as_rank(config: Config, command: Sequence[str], environment: ClusterEnvironment) -> RunPlan:
    """Prepare a run that hpctrain didn't launch: its user started its ranks, or wrote its batch script.

    Args:
        config: checked; without a `run_dir`, the job's id names it, so that a requeued job finds it again.
        command: the words that were typed.
        environment: rank zero's, or the batch script's.
    """
    if config.run_dir is None and environment.job_id is not None:
        path = Path("runs") / str(config.name) / f"job_{environment.job_id}"
        config = dataclasses.replace(config, run_dir=str(path))
    return prepare(config, command)


def discard_unstarted(directory: RunDirectory) -> None:
    """Remove a new run directory for which nothing was submitted or started."""
    existed = directory.config_before.exists()
    if not existed and not directory.job_records() and not directory.attempts.exists():
        shutil.rmtree(directory.path)


def default_path(name: str) -> Path:
    """Return `runs/NAME/DATE_TIME` without creating it."""
    return Path("runs") / name / time.strftime("%Y-%m-%d_%H-%M-%S")


def claim_default_path(name: str) -> Path:
    """Make `runs/NAME/DATE_TIME`, with a number appended if another run has claimed it.

    Raises:
        RunDirectoryError: it can't be created here.
    """
    wanted = default_path(name)
    path, count = wanted, 1
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir(mode=0o700)  # until `RunDirectory.create` gives it the run's mode
            except FileExistsError:
                count += 1
                path = wanted.with_name(f"{wanted.name}_{count}")
            else:
                return path
    except OSError as error:
        raise RunDirectoryError(
            f"run_dir={wanted}: can't be created here ({error.strerror}); set run_dir to a folder that you may write to"
        ) from error


def changed_keys(old: Mapping[str, Any], new: Config) -> list[str]:
    """Return the keys whose values differ, sorted; what may change when a run is resumed isn't part of a run.

    Args:
        old: the stored values by their full keys.
        new: the configuration with which the run is to continue.
    """
    after = flat(new)
    changed = (key for key in old.keys() | after.keys() if old.get(key) != after.get(key))
    return sorted(key for key in changed if not key.startswith("resume."))


def has_more_to_train(old: Mapping[str, Any], new: Config) -> bool:
    """Return whether a completed run has something left to train: its length changed, or what decides the weights."""
    length = ("trainer.max_steps", "trainer.max_epochs")
    return any(key in length or decides_the_weights(key) for key in changed_keys(old, new))


def refuse_other_run(old: Config, new: Config) -> None:
    """Refuse a configuration that would change a run's weights; print the other changes.

    Raises:
        ConfigError: names the changed keys on which the weights depend.
    """
    before, after = flat(old), flat(new)
    changed = changed_keys(before, new)
    refused = [key for key in changed if decides_the_weights(key) and not new.resume.allow_config_change]
    if refused:
        key, others = refused[0], refused[1:]
        raise ConfigError(
            key,
            after.get(key),
            f"the run in {new.run_dir} has {before.get(key)}, and the weights depend on it"
            + (f"; they also depend on {', '.join(others)}" if others else ""),
            "choose another run_dir, or set resume.allow_config_change=true",
        )
    for key in changed:
        inexact = "; the run is no longer exact" if decides_the_weights(key) else ""
        print(f"the run continues with {key}={after.get(key)} instead of {before.get(key)}{inexact}")


def changed_config(directory: RunDirectory, overrides: Sequence[str], config_dir: str | None) -> Config:
    """A run's configuration with overrides on top, which may choose another option of a group.

    Raises:
        ConfigError: an override is invalid.
    """
    keys = {override: override.lstrip("+~").partition("=")[0] for override in overrides}
    groups = {key for key in keys.values() if "." not in key}
    default = Config()
    typed = {name for name in Config.__dataclass_fields__ if dataclasses.is_dataclass(getattr(default, name))}
    chosen = groups & {*typed, *OPEN_GROUPS}
    values = [override for override in overrides if keys[override].split(".")[0] not in chosen]
    config = dataclasses.replace(load(directory.config, values), run_dir=str(directory.path))
    if chosen:
        # Hydra takes a tenth of a second to import, and only a changed group needs it
        from hpctrain.config.compose import Composer

        wanted = [override for override in overrides if override not in values]
        # composition checks these together with the chosen groups
        if "cluster" in chosen:
            wanted.append(f"nodes={config.nodes}")
        if "trainer" not in chosen:
            wanted.append(f"trainer.global_batch_size={config.trainer.global_batch_size}")
        composed = Composer(config_dir).compose(wanted)
        config = dataclasses.replace(config, **{group: getattr(composed, group) for group in chosen})
    check(config)
    return config
