"""The code of a launch: copied when its first run needs it, and recorded in each of its runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.config.code import Code
from hpctrain.config.program import command_of
from hpctrain.config.root import Config, ProgramConfig, RunConfig, flat
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.files import errors_naming, on_each_file
from hpctrain.launch import code_files
from hpctrain.launch.code_files import CodeFiles
from hpctrain.phrases import listed
from hpctrain.run.code import CodeFile, CodeSnapshot, current_code, describe_file, make_own_copy, publish, record_code
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import explain
from hpctrain.run.import_path import checked_in, hooked_packages, python_prefixes
from hpctrain.run.source_folder import ask_git
from hpctrain.run.written_files import carry_over
from hpctrain.streams import Printer, print_warning

INSTALLED = ("hpctrain", "torch")
"""Packages whose classes need no copy."""


class LaunchCode:
    """The code of a launch, which all its runs share.

    Args:
        home: the directory of the run or the sweep, into which the code is copied unless that has recorded some.
        now: also take it for runs that have recorded code already, as `resume --code=now` does.
        required: refuse a run whose own code can't be copied; otherwise it only gets a warning.
        warn: gets lines on code that isn't copied.
    """

    def __init__(
        self, home: RunDirectory, *, now: bool = False, required: bool = True, warn: Printer = print_warning
    ) -> None:
        self._home = home
        self._now = now
        self._required = required
        self._warn = warn
        self._copies: dict[str, CodeSnapshot | None] = {}
        self._checked: set[Path] = set()
        self._carried: set[tuple[Path, Path]] = set()

    def assign_to(self, directory: RunDirectory, config: RunConfig) -> dict[str, Any] | None:
        """Decide with which code a run is made from now on, and record it if that is new.

        Args:
            directory: of the run.
            config: of the run.

        Returns:
            What the manifest says of the code; None if the ranks import from their working directory.

        Raises:
            ConfigError: the run needs code that can't be copied, or began with another `run.cwd`.
            RunDirectoryError: the copy can't be written, or that of an existing run isn't as it was taken.
        """
        recorded_code = current_code(directory)
        own_folders = self._own_folders(directory, config, recorded_code)
        if config.code.snapshot == "none":
            code = None
        elif recorded_code is not None and not self._now:
            self._require_intact(recorded_code)
            return recorded_code.description
        else:
            # all runs of a search have the code that was copied when it was submitted
            code = (None if self._now else current_code(self._home)) or self._copy(config, own_folders)
        if code is not None:
            code = replace(code, run=directory)
            # in a sweep, a program that has begun runs in its own copy
            if recorded_code is not None and code.own_paths is not None and recorded_code == recorded_code.as_own_copy:
                code = self._own_copy(code)
        if code != recorded_code:
            if code is not None and recorded_code is not None and isinstance(config, ProgramConfig):
                self._carry_over(recorded_code, code)
            record_code(directory, code, time.time())
        return None if code is None else code.description

    def _own_copy(self, code: CodeSnapshot) -> CodeSnapshot:
        try:
            return code if code == code.as_own_copy else make_own_copy(code, self._warn)
        except OSError as error:
            problem = f"its own copy of the code can't be written ({explain(error)})"
            raise RunDirectoryError(f"{code.run.path}: {problem}; make room, and resume again") from error

    def _require_intact(self, recorded_code: CodeSnapshot) -> None:
        """Refuse what the launcher of the next attempt would refuse, which may wait for hours in the queue."""
        if recorded_code.folder not in self._checked:
            self._checked.add(recorded_code.folder)
            if damage := recorded_code.find_damage():
                raise RunDirectoryError(damage)

    def _carry_over(self, recorded_code: CodeSnapshot, code: CodeSnapshot) -> None:
        """Let the program find what it wrote into its working directory: it may continue from there."""
        if (recorded_code.folder, code.folder) in self._carried or recorded_code.folder == code.folder:
            return
        self._carried.add((recorded_code.folder, code.folder))
        try:
            conflicts = carry_over(recorded_code, code)
        except (OSError, RunDirectoryError) as error:
            self._warn(f"what the program wrote into {recorded_code.folder} isn't there in today's code: {error}")
            return
        if conflicts:
            which = f"{listed(conflicts)}, which the program wrote into {recorded_code.folder}"
            self._warn(f"{which}: today's code has the same names, so the program won't find its own")

    def _own_folders(
        self, directory: RunDirectory, config: RunConfig, recorded_code: CodeSnapshot | None
    ) -> Sequence[str] | None:
        """Return the patterns of folders of which the run has its own; None if its program shares the copy."""
        if not isinstance(config, ProgramConfig):
            return None
        is_own = config.run.cwd == "own"
        if recorded_code is not None:
            is_own = recorded_code.own_paths is not None
        elif config.run.cwd is None and not directory.config.exists():
            # a run that is in no sweep shares ignored folders with the original, where the user's next step reads them
            is_own = self._home != directory
        if recorded_code is not None and config.run.cwd not in (None, cwd := "own" if is_own else "shared"):
            problem = f"the run in {directory.path} began with {cwd}, and its files are there"
            raise ConfigError("run.cwd", config.run.cwd, problem, "leave it out, or choose another run_dir")
        return config.run.own_folders if is_own else None

    def _copy(self, config: RunConfig, own_folders: Sequence[str] | None) -> CodeSnapshot | None:
        settings = repr((config.code, own_folders))
        if settings not in self._copies:
            self._copies[settings] = self._copy_once(config, own_folders)
        return self._copies[settings]

    def _copy_once(self, config: RunConfig, own_folders: Sequence[str] | None) -> CodeSnapshot | None:
        try:
            code = copy_code(Path.cwd(), config.code, self._home, config.mode, own_folders=own_folders, warn=self._warn)
        except ConfigError as error:
            if self._required and needs_code(config):
                raise
            problem = f"{error.problem}; {error.remedy}"
            self._warn(f"the code isn't copied, so the run imports what is there when it starts: {problem}")
            return None
        if code is None:
            return None
        own_paths = () if self._now else code.own_paths or ()
        if filled := [path for path in own_paths if not code_files.is_empty(code.root / path)]:
            remedy = "if the program reads what is in yours, set run.cwd=shared, or run.own_folders without that name"
            self._warn(f"each run has its own {listed(filled)}, empty at first; {remedy}")
        prefixes: Iterator[Path] = iter(())
        if isinstance(config, ProgramConfig):
            prefixes = python_prefixes(command_of(config)[0], os.environ, (code.submit_dir, code.root))
        if hooked := hooked_packages(code, prefixes):
            remedy = "reinstall with `pip install -e . --config-settings editable_mode=compat`"
            problem = "installed editable by an import hook, so the run imports the original and not its copy"
            self._warn(f"{listed(hooked)}: {problem}; {remedy}")
        return code


def needs_code(config: RunConfig) -> bool:
    """Whether a run may import code that isn't installed: a program, or a training with a class of one's own.

    Other trainings run without a copy if none can be made: people type `python -m hpctrain` in their home folder.
    """
    if not isinstance(config, Config):
        return True
    targets = (value for key, value in flat(config).items() if key.rpartition(".")[2] == "_target_")
    return any(str(target).partition(".")[0] not in INSTALLED for target in targets if target is not None)


@contextlib.contextmanager
def importing_code_of(run_dir: str | Path | None, *, now: bool = False) -> Iterator[None]:
    """Context manager in which classes are looked up in the code with which a run continues.

    Args:
        run_dir: the run's directory, which may not exist yet; None for a new run.
        now: whether the run continues with today's code.

    Raises:
        RunDirectoryError: the run's copy is missing, or files of it are and the code can't be checked.
    """
    code = None if now or run_dir is None else current_code(RunDirectory.at(run_dir))
    if code is None:
        yield
        return
    if not code.folder.is_dir():
        raise RunDirectoryError(code.find_damage())
    try:
        with checked_in(code):
            yield
    except ConfigError as error:
        # its file may have been removed
        if damage := code.find_damage(contents=False):
            raise RunDirectoryError(damage) from error
        raise


def require_original_folder(directories: Sequence[RunDirectory], warn: Printer = print_warning) -> None:
    """Refuse to take today's code of runs in another folder than that of their code.

    A clone of the repository, or a work tree of it, may stand for the original; so may any folder if that is gone.

    Args:
        directories: of the runs.
        warn: gets a line if the original is gone.

    Raises:
        RunDirectoryError: the original is there, or the working directory is in another folder of a clone.
    """
    here = Path.cwd().resolve()
    codes = [code for directory in reversed(directories) if (code := current_code(directory)) is not None]
    # of runs of a sweep, which began in the same folder, the first one stands for all
    for recorded_code in {(code.submit_dir, code.commit): code for code in codes}.values():
        expected, run = _folder_like(recorded_code, here), recorded_code.run
        if expected == here:
            continue
        if expected.is_dir():
            command = f"`cd {shlex.quote(str(expected))} && python -m hpctrain resume {run.as_typed} --code=now`"
            raise RunDirectoryError(f"{run.path}: its code comes from {expected}, not from {here}: type {command}")
        warn(f"{expected}, from which the code of {run.path} comes, is gone: today's code is that in {here}")


def _folder_like(code: CodeSnapshot, here: Path) -> Path:
    """Return the folder of a run's code, in the repository of the working directory if that has the run's commit."""
    original = code.submit_dir.resolve()
    if original == here or not code.commit:
        return original
    commit = ask_git(here, "cat-file", "-e", f"{code.commit}^{{commit}}", timeout_s=code_files.LIST_TIMEOUT_S)
    root = None if commit.output is None else code_files.repository_of(here)
    return original if root is None else root / code.place


def copy_code(
    folder: Path, settings: Code, home: RunDirectory, mode: int, *, own_folders: Sequence[str] | None, warn: Printer
) -> CodeSnapshot | None:
    """Copy the code of a launch into the directory of a run or a sweep, which exists; None if there isn't any code.

    Args:
        folder: the working directory.
        settings: what to copy.
        home: the directory.
        mode: permissions of the run.
        own_folders: patterns of folders of which each run has its own; None if the runs share everything. With them,
            even a folder without files is copied.
        warn: gets lines on what isn't copied, and on an earlier copy that was damaged.

    Returns:
        The copy, as the code of that run or sweep.

    Raises:
        ConfigError: the code can't be found or read, or there is too much.
        RunDirectoryError: the copy can't be written.
    """
    files = code_files.find_code(Path(os.path.realpath(folder)), settings, home.path)
    own_paths = None if own_folders is None else tuple(code_files.exclude_own_folders(files, own_folders))
    if own_paths is None and not files.copied:
        return None
    code_files.require_size(files, settings.max_mb * 1e6)
    code = CodeSnapshot(run=home, digest="", folder=home.code, root=files.root, place=files.place)
    code = replace(code, commit=files.commit, own_paths=own_paths)
    with home.permissions(mode):
        home.close_folder(home.code, mode)
        try:
            code = publish(code, lambda target: _copy(files, target), warn)
            _add_folders_and_links(files, code.folder)  # to an earlier copy
        except OSError as error:
            remedy = "make room, choose a folder that you may write to, or copy no code with code.snapshot=none"
            problem = f"run_dir={home.path}: the code can't be copied there ({explain(error)})"
            raise RunDirectoryError(f"{problem}; {remedy}") from error
    if secrets := sorted(files.secrets):
        cause = "such names are usual for passwords and keys; the run finds the originals through links"
        warn(f"{listed(secrets)}: not copied with the code, since {cause}. To copy one: code.include=[{secrets[0]}]")
    return code


def _copy(files: CodeFiles, target: Path) -> Sequence[CodeFile]:
    """Copy all files, and link to what isn't copied; return what was copied."""
    for folder in {files.place, *(path.rpartition("/")[0] for path in files.copied)}:
        (target / folder).mkdir(parents=True, exist_ok=True)
    _add_folders_and_links(files, target)
    copied = on_each_file(lambda path: _copy_one(files, path, target / path), list(files.copied))
    return [file for file in copied if file is not None]


def _copy_one(files: CodeFiles, path: str, target: Path) -> CodeFile | None:
    """Copy a file or a symbolic link; None if it vanished.

    No hard link to the original, which an editor that writes in place would change. The copy has a new time, since
    sites purge scratch folders by age, and can't be written: runs of a sweep share its contents. A file that is written
    to meanwhile is taken as it is read.
    """
    try:
        if not files.copied[path] and (files.root / path).is_symlink():
            target.symlink_to(_link_text(files, path))
            return describe_file(target, path)
        source = (files.root / path).open("rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except PermissionError as error:
        problem = f"{path} can't be read ({error.strerror})"
        remedy = f"correct its permissions, or leave it out with code.exclude=[{path}]"
        raise code_files.refusal(problem, remedy) from error
    with source, errors_naming(target):
        mode = os.fstat(source.fileno()).st_mode
        # users who can't read the original must not be able to read the copy
        allowed = mode & (0o555 if mode & stat.S_IXUSR else 0o444) | stat.S_IRUSR
        with open(target, "xb", opener=lambda name, flags: os.open(name, flags, allowed)) as copy:
            shutil.copyfileobj(source, copy)
    return describe_file(target, path)


def _link_text(files: CodeFiles, path: str) -> str:
    """Return a symbolic link's text in the copy: relative if the copy has its target, otherwise absolute."""
    link = files.root / path
    # os.readlink, since Path.readlink would change its text; a link to a link leads to that one in the copy, too
    target = Path(os.path.normpath(link.parent / os.readlink(link)))  # noqa: PTH115
    # the root may have other names
    above = [path for path in (target, *target.parents) if os.path.exists(path)]  # noqa: PTH110 - exists() raises for a folder of another user
    roots = [path for path in above if path.samefile(files.root)]
    if not roots:
        return str(target)
    inside = target.relative_to(roots[0]).as_posix()
    is_copied = any(part in files.copied or part in files.linked for part in code_files.parts(inside))
    if is_copied or inside == "." or inside in files.folders or not os.path.lexists(files.root / inside):
        return os.path.relpath(files.root / inside, link.parent)
    return str(target)


def _add_folders_and_links(files: CodeFiles, target: Path) -> None:
    """Make the folders, and links to what isn't copied, unless the copy has something in their place."""
    for path in sorted(files.folders | files.linked):
        place = target / path
        # not in a folder that the program moved elsewhere, and replaced by a link
        if not os.path.lexists(place) and place.parent.resolve().is_relative_to(target.resolve()):
            with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
                if path in files.linked:
                    place.symlink_to(files.root / path)
                else:
                    place.mkdir()
