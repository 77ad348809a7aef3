"""The directory of a launch: a new one is claimed, and an error leaves everything as it was found."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json_lines, write_atomic
from hpctrain.run.code import list_of
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import explain
from hpctrain.run.gone_checkpoints import STARTS_OVER
from hpctrain.run.launch_mark import LaunchMark


@contextlib.contextmanager
def undone_on_error(
    run_dir: str | Path | None,
    name: str | None = None,
    command: Sequence[str] | None = None,
    *,
    requeued: bool = False,
) -> Iterator[RunDirectory]:
    """Yield the directory of a run or a sweep; an error inside the context leaves it as it was found, or absent.

    If the process is killed instead, the mark of the launch stays (`LaunchMark`). Only what preparing and submitting
    write is undone, and nothing once a job is recorded or an attempt is claimed: of a run, of a run in the sweep, or of
    the search that the run belongs to. A job that couldn't be recorded fails at its start, because its pickled call is
    gone.

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
            stack.enter_context(_content_restored_on_error(directory))
            yield directory
    except BaseException:
        _remove_empty(absent)
        raise


@contextlib.contextmanager
def _content_restored_on_error(directory: RunDirectory) -> Iterator[None]:
    path = directory.path
    found = (path.stat(), set(path.iterdir())) if path.exists() else None
    folders = (directory.submitit, directory.logs, directory.claims, directory.checkpoints, directory.code)
    absent = [folder for folder in folders if not folder.exists()]
    # the configuration comes first: as long as it can't be restored, the one before it must stay
    files = [directory.config, directory.config_before, directory.manifest, directory.jobs, directory.code_records]
    files += [
        directory.sweep,
        *(directory.attempt(number) / STARTS_OVER for number in directory.claimed_attempts()[-1:]),
    ]
    before = {file: (file.read_bytes(), file.stat()) if file.is_file() else None for file in files}
    launches, copies = _launches(directory), _copies(directory)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the caller needs the first error
            if _launches(directory) == launches:
                for file, content in before.items():
                    _restore(file, content)
                _remove_copies(directory, _copies(directory) - copies)
                _remove_empty(absent)
                # a sweep's folder with a new run in it keeps its new mode
                if found is not None and set(path.iterdir()) == found[1]:
                    path.chmod(stat.S_IMODE(found[0].st_mode))
        raise


def _launches(directory: RunDirectory) -> tuple[dict[Path, int], list[int]]:
    """What changes when a job is recorded or an attempt claimed."""
    path, name = directory.path, directory.jobs.name
    records = [directory.jobs, *path.glob(f"[0-9]*/{name}")]  # of a sweep's runs, too
    if path.name.isdecimal():
        records.append(path.parent / name)  # of a search, whose tasks ask for this run
    sizes = {file: size for file in records if file.is_file() and (size := file.stat().st_size)}
    return sizes, directory.claimed_attempts()


def _copies(directory: RunDirectory) -> set[str]:
    """The digests of the copies of the code."""
    return {path.stem for path in directory.code.glob("[!.]*")}


def _remove_copies(directory: RunDirectory, digests: Collection[str]) -> None:
    """Remove copies of the code that no run uses; another launch into the same sweep may have made some of them."""
    records = [directory.code_records, *directory.path.glob("*/code.jsonl")] if digests else []
    used = {record.get("digest") for file in records for record in read_json_lines(file)}
    for digest in set(digests) - used:
        shutil.rmtree(directory.code / digest, ignore_errors=True)
        list_of(directory.code / digest).unlink(missing_ok=True)


def _restore(file: Path, before: tuple[bytes, os.stat_result] | None) -> None:
    if before is None:
        file.unlink(missing_ok=True)
        return
    content, found = before
    now = file.stat()
    if (now.st_ino, now.st_mtime_ns) != (found.st_ino, found.st_mtime_ns):
        mode = stat.S_IMODE(found.st_mode)
        write_atomic(file, content, mode=mode)
        file.chmod(mode)
        # `status` sorts the runs by it
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


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
            f"run_dir={wanted}: can't be created here ({explain(error, wanted)}); set run_dir to a folder that you may "
            "write to"
        ) from error
