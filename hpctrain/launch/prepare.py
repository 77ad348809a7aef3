"""A run before anything is launched: its plan, its stored configuration, and its directory, which an error restores."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.cluster import Slurm
from hpctrain.config.resources import Resources, node_counts, resources_of
from hpctrain.config.resume import Resume
from hpctrain.config.root import Config, ProgramConfig, RunConfig, decides_the_weights, flat, with_absolute_init
from hpctrain.config.stored import load_run, to_yaml
from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json_lines, write_atomic, write_json
from hpctrain.launch.after import resolved
from hpctrain.launch.existing_run import changed_keys, refuse_other_run, with_stored_texts
from hpctrain.launch.launch_code import LaunchCode
from hpctrain.run.code import CodeSnapshot, list_of
from hpctrain.run.config_change import change_config, trained_config
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import explain
from hpctrain.run.gone_checkpoints import STARTS_OVER, allow_start_over
from hpctrain.run.import_path import python_path
from hpctrain.run.launch_mark import LaunchMark
from hpctrain.run.ledger import Ledger
from hpctrain.run.manifest import manifest
from hpctrain.startup import is_found_here
from hpctrain.streams import Printer

IMAGE_PYTHON = "python3"
"""The Python of an image, by the name that all official ones give it; the submitting one isn't mounted, since its C
library and drivers needn't fit the image."""


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

    @property
    def rank_python(self) -> str:
        """The Python of the ranks: a path, or a name that is looked up in PATH, or in that of their container."""
        cluster = self.config.cluster
        if not isinstance(cluster, Slurm):
            return sys.executable
        return cluster.python or (sys.executable if cluster.container.image is None else IMAGE_PYTHON)

    def rank_command(self, code: CodeSnapshot | None) -> list[str]:
        """Return the command of a rank, which the run directory follows.

        The module runs `rank.entry.main` with the workload of a program or of a training.

        Args:
            code: from which the rank imports; None for its working directory.
        """
        module = "hpctrain.program" if self.is_program else "hpctrain.train"
        safe = [] if code is None or is_found_here() else ["-P"]
        return [self.rank_python, *safe, "-u", "-m", module]

    def code_variables(self, code: CodeSnapshot | None, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with which a rank, and the processes that it starts, import the run's code.

        A rank of a program gets none: it makes those of the program.

        Args:
            code: from which the rank imports; None for its working directory.
            environ: of the launcher.
        """
        return {} if code is None or self.is_program else {"PYTHONPATH": python_path(code, environ)}


def plan(config: RunConfig) -> RunPlan:
    """Plan a run without writing anything.

    Args:
        config: checked; without a `run_dir`, the plan names the default one, which isn't claimed.

    Raises:
        ConfigError: `after` names something that isn't a run, or a run that waits for this one.
    """
    assert config.name is not None
    directory = RunDirectory.at(config.run_dir or default_path(config.name))
    resolved_config = dataclasses.replace(config, run_dir=str(directory.path), after=resolved(config, directory))
    return RunPlan(resolved_config, directory, resources_of(config))


def prepare(
    config: RunConfig,
    command: Sequence[str],
    varied: Mapping[str, str] | None = None,
    origin: Mapping[str, Any] | None = None,
    *,
    report: Printer = print,
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
            origin = origin or manifest(command, Path.cwd())
            write_json(directory.manifest, {**origin, "varied": dict(varied or {}), "code": copied})
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
    with rollback_on_error(config.run_dir, config.name, command, requeued=requeued) as directory:
        code = LaunchCode(directory) if takes_code else None
        return prepare(dataclasses.replace(config, run_dir=str(directory.path)), command, code=code)


@contextlib.contextmanager
def rollback_on_error(
    run_dir: str | Path | None,
    name: str | None = None,
    command: Sequence[str] | None = None,
    *,
    requeued: bool = False,
) -> Iterator[RunDirectory]:
    """Yield the directory of a run or a sweep; an error inside the context leaves it as it was found, or absent.

    If the process is killed instead, the mark of the launch stays (`LaunchMark`), which can't replace this: a launch
    that sbatch refuses is to leave nothing, and a failed resume no changed files. Only what preparing and submitting
    write is undone, and nothing once a job is recorded or an attempt is claimed: of a run, of a run in the sweep, or of
    the search that the run belongs to; nor if another command is launching a run there. A job that couldn't be recorded
    fails at its start, because its pickled call is gone.

    Args:
        run_dir: the directory; None claims a new one, `runs/NAME/DATE_TIME`.
        name: the run's, for a new directory.
        command: as typed, for the mark; None inside the context of a launch that has one.
        requeued: see `LaunchMark.held`.

    Raises:
        RunDirectoryError: a new directory can't be created here, or another launch is using it.
    """
    directory = RunDirectory.at(default_path(str(name)).parent if run_dir is None else run_dir)
    path = directory.path
    absent = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    try:
        if run_dir is None:
            directory = RunDirectory.at(claim_default_path(str(name)))
            absent.insert(0, directory.path)
        with contextlib.ExitStack() as stack:
            if command is not None:
                stack.enter_context(LaunchMark(directory).held(command, requeued=requeued))
            stack.enter_context(_content_restored_on_error(directory, own_mark=command is not None))
            yield directory
    except BaseException:
        _remove_empty(absent)
        raise


@contextlib.contextmanager
def _content_restored_on_error(directory: RunDirectory, *, own_mark: bool) -> Iterator[None]:
    path = directory.path
    folder_state = (path.stat(), set(path.iterdir())) if path.exists() else None
    folders = (directory.submitit, directory.logs, directory.claims, directory.checkpoints, directory.code)
    absent = [folder for folder in folders if not folder.exists()]
    # the configuration comes first: as long as it can't be restored, the one before it must stay
    files = [directory.config, directory.config_before, directory.manifest, directory.jobs, directory.code_records]
    files += [
        directory.sweep,
        *(directory.attempt(number) / STARTS_OVER for number in directory.claimed_attempts()[-1:]),
    ]
    before = {file: (file.read_bytes(), file.stat()) if file.is_file() else None for file in files}
    records, digests = _launch_records(directory), _code_digests(directory)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the caller needs the first error
            # a sweep's folder is taken without its mark, which another command may hold
            is_launched_elsewhere = not own_mark and LaunchMark(directory).exists()
            if not is_launched_elsewhere and _launch_records(directory) == records:
                for file, content in before.items():
                    _restore(file, content)
                _remove_copies(directory, _code_digests(directory) - digests)
                _remove_empty(absent)
                # a sweep's folder with a new run in it keeps its new mode
                if folder_state is not None and set(path.iterdir()) == folder_state[1]:
                    path.chmod(stat.S_IMODE(folder_state[0].st_mode))
        raise


def _launch_records(directory: RunDirectory) -> set[tuple[Path, int]]:
    """Files that show a launch, with sizes: records of jobs, claims of attempts, and configurations of a sweep's runs.

    They change when a job is recorded, an attempt claimed, or a run of a sweep written.
    """
    path, name = directory.path, directory.jobs.name
    records = [directory.jobs, *path.glob(f"[0-9]*/{name}")]
    if path.name.isdecimal():
        records.append(path.parent / name)  # of a search, whose tasks ask for this run
    sizes = {(file, size) for file in records if file.is_file() and (size := file.stat().st_size)}
    patterns = ("attempts/[0-9]*", "[0-9]*/attempts/[0-9]*", "[0-9]*/config.yaml")
    return sizes | {(match, 0) for pattern in patterns for match in path.glob(pattern)}


def _code_digests(directory: RunDirectory) -> set[str]:
    """The digests of the copies of the code, without unfinished ones."""
    return {path.stem for path in directory.code.glob("[!.]*")}


def _remove_copies(directory: RunDirectory, digests: Collection[str]) -> None:
    """Remove copies of the code that no run uses; another launch into the same sweep may have made some of them."""
    records = [directory.code_records, *directory.path.glob("*/code.jsonl")] if digests else []
    used_digests = {record.get("digest") for file in records for record in read_json_lines(file)}
    for digest in set(digests) - used_digests:
        shutil.rmtree(directory.code / digest, ignore_errors=True)
        with contextlib.suppress(OSError):
            list_of(directory.code / digest).unlink()


def _restore(file: Path, before: tuple[bytes, os.stat_result] | None) -> None:
    if before is None:
        file.unlink(missing_ok=True)
        return
    content, status = before
    now = file.stat()
    if (now.st_ino, now.st_mtime_ns) != (status.st_ino, status.st_mtime_ns):
        mode = stat.S_IMODE(status.st_mode)
        write_atomic(file, content, mode=mode)
        file.chmod(mode)
        # `status` sorts the runs by it
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def _remove_empty(folders: list[Path]) -> None:
    # rmdir, because a folder may hold files of the user, or of another launch
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def default_path(name: str) -> Path:
    """Return `runs/NAME/DATE_TIME` without creating it."""
    return Path("runs") / name / time.strftime("%Y-%m-%d_%H-%M-%S")


def claim_default_path(name: str) -> Path:
    """Make `runs/NAME/DATE_TIME`, with a number appended if another run has claimed it.

    Raises:
        RunDirectoryError: it can't be created here.
    """
    base = default_path(name)
    path, count = base, 1
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir(mode=0o700)  # until `RunDirectory.create` gives it the run's mode
            except FileExistsError:
                count += 1
                path = base.with_name(f"{base.name}_{count}")
            else:
                return path
    except OSError as error:
        raise RunDirectoryError(
            f"run_dir={base}: can't be created here ({explain(error, base)}); set run_dir to a folder that you may "
            "write to"
        ) from error
