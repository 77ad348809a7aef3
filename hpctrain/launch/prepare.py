"""A run before anything is launched: its directory, its resources, its stored configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.cluster import Slurm
from hpctrain.config.identity import decides_the_weights, flat
from hpctrain.config.node_counts import node_counts
from hpctrain.config.program import ProgramConfig
from hpctrain.config.resources import Resources, resources_of
from hpctrain.config.resume import Resume
from hpctrain.config.root import Config, with_absolute_init
from hpctrain.config.run_config import RunConfig
from hpctrain.config.stored import load_run, to_yaml
from hpctrain.errors import RunDirectoryError
from hpctrain.files import write_json
from hpctrain.launch.after import resolved
from hpctrain.launch.existing_run import changed_keys, refuse_other_run, with_stored_texts
from hpctrain.launch.launch_code import LaunchCode
from hpctrain.launch.run_dir import default_path, undone_on_error
from hpctrain.run.config_change import change_config, trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.gone_checkpoints import allow_start_over
from hpctrain.run.launch_mark import LaunchMark
from hpctrain.run.ledger import Ledger
from hpctrain.run.manifest import manifest
from hpctrain.streams import Report


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run to launch: everything that follows from its configuration, derived once.

    Attributes:
        config: of the run, with its `run_dir`.
        directory: of the run.
        resources: of the run.
    """

    config: RunConfig
    directory: RunDirectory
    resources: Resources

    @property
    def node_counts(self) -> tuple[int, ...]:
        """The numbers of nodes on which the run may train, largest first."""
        return node_counts(self.config, self.resources)

    @property
    def outlives_a_node(self) -> bool:
        """Whether the job stays when one of its nodes dies, because ranks can restart on the others."""
        return self.slurm.spare_nodes > 0 or len(self.node_counts) > 1

    @property
    def slurm(self) -> Slurm:
        """The keys of cluster=slurm, for code that runs only there."""
        assert isinstance(self.config.cluster, Slurm)
        return self.config.cluster

    @property
    def training(self) -> Config:
        """The configuration of a training, for code that runs only there."""
        assert isinstance(self.config, Config)
        return self.config

    @property
    def is_program(self) -> bool:
        """Whether the run is a program's, and not a training."""
        return isinstance(self.config, ProgramConfig)


def plan(config: RunConfig) -> RunPlan:
    """Plan a run without writing anything.

    Args:
        config: checked; without a `run_dir`, the plan names the default one, which isn't claimed.

    Raises:
        ConfigError: `after` names something that isn't a run, or a run that waits for this one.
    """
    assert config.name is not None
    directory = RunDirectory.at(config.run_dir or default_path(config.name))
    whole = dataclasses.replace(config, run_dir=str(directory.path), after=resolved(config, directory))
    return RunPlan(whole, directory, resources_of(config))


def prepare(
    config: RunConfig,
    command: Sequence[str],
    varied: Mapping[str, str] | None = None,
    origin: Mapping[str, Any] | None = None,
    *,
    report: Report = print,
    code: LaunchCode | None = None,
) -> RunPlan:
    """Create the directory of a new run, or open an existing run's, and store the configuration.

    Args:
        config: checked, with a `run_dir`.
        command: the words that were typed, for the manifest.
        varied: the keys that a sweep varies, with this run's values, for the manifest.
        origin: the manifest, if the caller has made it already.
        report: gets a line on each key that continues an existing run with another value.
        code: of the launch; None for ranks that import from their working directory.

    Returns:
        The plan of the run, whose directory exists.

    Raises:
        ConfigError: the directory holds a run, and this configuration would change its weights; or the run needs code
            that can't be copied.
        RunDirectoryError: the directory can't be created, or holds other files.
    """
    assert config.run_dir is not None
    run = plan(with_absolute_init(config) if isinstance(config, Config) else config)
    directory = run.directory
    if directory.config.exists():
        old, trained = load_run(directory.config), load_run(trained_config(directory))
        if not any(map(decides_the_weights, changed_keys(flat(trained), run.config))):
            old = trained  # no step was trained with what a resume changed since then
        refuse_other_run(old, run.config, report)
        run = dataclasses.replace(run, config=with_stored_texts(old, run.config, report))
    else:
        refuse_other_files(directory)
    # typed for this resume alone, not for later ones
    stored = dataclasses.replace(run.config, resume=Resume())
    directory.create(config.mode)
    with directory.permissions():
        if not directory.config.exists():
            # of a launch that was killed, which launched nothing with its code and its values
            LaunchMark(directory).remove_temporary_files()
            directory.code_records.unlink(missing_ok=True)
            directory.manifest.unlink(missing_ok=True)
        copied = None if code is None else code.assign_to(directory, stored)
        if not directory.manifest.exists():
            known = origin or manifest(command, Path.cwd())
            write_json(directory.manifest, {**known, "varied": dict(varied or {}), "code": copied})
        change_config(directory, to_yaml(stored))
        if config.resume.from_scratch:
            allow_start_over(directory, Ledger(directory).last_claim())
    return dataclasses.replace(run, config=stored)


def refuse_other_files(directory: RunDirectory) -> None:
    """Refuse a folder with files for a new run, unless they are those of a launch that was killed.

    Raises:
        RunDirectoryError: they are other files.
    """
    if directory.config.exists() or LaunchMark(directory).is_unfinished or not directory.path.is_dir():
        return
    if any(directory.path.iterdir()):
        raise RunDirectoryError(
            f"run_dir={directory.path}: expected a run or an empty folder, found other files; name an empty or new one"
        )


def prepare_as_rank(
    config: RunConfig, command: Sequence[str], environment: ClusterEnvironment, *, takes_code: bool = False
) -> RunPlan:
    """Prepare a run that hpctrain didn't launch: its user started its ranks, or wrote its batch script.

    Args:
        config: checked; without a `run_dir`, the job's id names it, so that a requeued job finds it again.
        command: the words that were typed.
        environment: rank zero's, or the batch script's.
        takes_code: copy the code if the run is new; ranks that run already have imported theirs.
    """
    if config.run_dir is None and environment.job_id is not None:
        path = Path("runs") / str(config.name) / f"job_{environment.job_id}"
        config = dataclasses.replace(config, run_dir=str(path))
    if environment.restart_count:
        # a requeued job runs the same command again, which was typed before anything was saved
        config = dataclasses.replace(config, resume=dataclasses.replace(config.resume, from_scratch=False))
    if config.run_dir is not None:
        refuse_other_files(RunDirectory.at(config.run_dir))
    # the earlier start of a requeued job has ended
    requeued = bool(environment.restart_count)
    with undone_on_error(config.run_dir, config.name, command, requeued=requeued) as directory:
        code = LaunchCode(directory) if takes_code else None
        return prepare(dataclasses.replace(config, run_dir=str(directory.path)), command, code=code)
