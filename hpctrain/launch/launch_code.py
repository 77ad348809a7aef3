"""The code of a launch: taken when its first run needs it, and recorded in each of its runs."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.config.identity import flat
from hpctrain.config.program import command_of
from hpctrain.config.root import Config, ProgramConfig, RunConfig
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.launch.code_copy import copy_code, warn_of_repair
from hpctrain.launch.code_files import CodeFilesError
from hpctrain.phrases import listed
from hpctrain.run.code import CodeSnapshot, current_code, make_own_copy, record_code
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
        home: the directory of the run or the sweep, into which the code is copied.
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
        known = current_code(directory)
        own_folders = self._own_folders(directory, config, known)
        if config.code.snapshot == "none":
            code = None
        elif known is not None and not self._now:
            self._require_intact(known)
            return known.description
        else:
            code = self._copy(config, own_folders)
        if code is not None:
            code = replace(code, run=directory)
            # in a sweep, a program that has begun runs in its own copy
            if known is not None and code.own_paths is not None and known == known.as_own_copy:
                code = self._own_copy(code)
        if code != known:
            if code is not None and known is not None and isinstance(config, ProgramConfig):
                self._carry_over(known, code)
            record_code(directory, code, time.time())
        return None if code is None else code.description

    def _own_copy(self, code: CodeSnapshot) -> CodeSnapshot:
        own_copy = code.as_own_copy
        if code != own_copy:
            try:
                warn_of_repair(own_copy, make_own_copy(code), self._warn)
            except OSError as error:
                problem = f"its own copy of the code can't be written ({explain(error)})"
                raise RunDirectoryError(f"{code.run.path}: {problem}; make room, and resume again") from error
        return own_copy

    def _require_intact(self, known: CodeSnapshot) -> None:
        """Refuse what the launcher of the next attempt would refuse, which may wait for hours in the queue."""
        if known.folder not in self._checked:
            self._checked.add(known.folder)
            if damage := known.find_damage():
                raise RunDirectoryError(damage)

    def _carry_over(self, known: CodeSnapshot, code: CodeSnapshot) -> None:
        """Let the program find what it wrote into its working directory: it may continue from there."""
        if (known.folder, code.folder) in self._carried or known.folder == code.folder:
            return
        self._carried.add((known.folder, code.folder))
        try:
            left = carry_over(known, code)
        except (OSError, RunDirectoryError) as error:
            self._warn(f"what the program wrote into {known.folder} isn't there in today's code: {error}")
            return
        if left:
            which = f"{listed(left)}, which the program wrote into {known.folder}"
            self._warn(f"{which}: today's code has the same names, so the program won't find its own")

    def _own_folders(
        self, directory: RunDirectory, config: RunConfig, known: CodeSnapshot | None
    ) -> Sequence[str] | None:
        """Return the patterns of folders of which the run has its own; None if its program shares the copy."""
        if not isinstance(config, ProgramConfig):
            return None
        is_own = config.run.cwd == "own"
        if known is not None:
            is_own = known.own_paths is not None
        elif config.run.cwd is None and not directory.config.exists():
            is_own = self._home != directory
        if known is not None and config.run.cwd not in (None, cwd := "own" if is_own else "shared"):
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
            mode = config.mode
            code = copy_code(Path.cwd(), config.code, self._home, mode, own_folders=own_folders, warn=self._warn)
        except CodeFilesError as error:
            if self._required and needs_code(config):
                raise ConfigError("code.snapshot", config.code.snapshot, error.problem, error.remedy) from error
            self._warn(f"the code isn't copied, so the run imports what is there when it starts: {error}")
            return None
        if code is not None:
            prefixes = [Path(sys.prefix)]
            if isinstance(config, ProgramConfig):
                prefixes += python_prefixes(command_of(config)[0], os.environ, (code.submit_dir, code.root))
            if hooked := hooked_packages(code, prefixes):
                self._warn(
                    f"{listed(hooked)}: installed editable by an import hook, so the run imports the original and not "
                    "its copy; reinstall with `pip install -e . --config-settings editable_mode=compat`"
                )
        return code


class SweepCode(LaunchCode):
    """The code that was copied when a sweep was submitted, also for runs that are made later.

    Args:
        home: the directory of the sweep, whose code records name the copy; without one, today's code is taken.
    """

    def assign_to(self, directory: RunDirectory, config: RunConfig) -> dict[str, Any] | None:
        """See `LaunchCode`."""
        code = current_code(self._home)
        if code is None or current_code(directory) is not None:
            return super().assign_to(directory, config)
        code = replace(code, run=directory)
        record_code(directory, code, time.time())
        return code.description


def needs_code(config: RunConfig) -> bool:
    """Whether a run may import code that isn't installed: a program, or a training with a class of one's own."""
    if not isinstance(config, Config):
        return True
    targets = (value for key, value in flat(config).items() if key.rpartition(".")[2] == "_target_")
    return any(str(target).partition(".")[0] not in INSTALLED for target in targets if target is not None)


@contextmanager
def importing_code_of(run_dir: str | Path | None, *, now: bool = False) -> Iterator[None]:
    """Inside the context, classes are looked up in the code with which a run continues.

    Args:
        run_dir: the run's directory, which may not exist yet; None for a new run.
        now: whether the run continues with today's code.

    Raises:
        RunDirectoryError: the run's copy is missing, or files of it are and the code can't be checked.
    """
    code = None if now or run_dir is None else current_code(RunDirectory.at(run_dir))
    if code is not None and not code.folder.is_dir():
        raise RunDirectoryError(code.find_damage())
    try:
        with checked_in(code):
            yield
    except ConfigError as error:
        # its file may have been removed
        if code is not None and (damage := code.find_damage()):
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
    seen: set[tuple[Path, str]] = set()
    for directory in directories:
        known = current_code(directory)
        if known is None or (known.submit_dir, known.commit) in seen:
            continue
        seen.add((known.submit_dir, known.commit))
        original = known.submit_dir.resolve()
        if here == original or (known.commit and _is_clone(here, known)):
            continue
        if original.is_dir():
            typed = f"`cd {shlex.quote(str(original))} && python -m hpctrain resume {directory.as_typed} --code=now`"
            raise RunDirectoryError(f"{directory.path}: its code comes from {original}, not from {here}: type {typed}")
        warn(f"{original}, from which the code of {directory.path} comes, is gone: today's code is that in {here}")


def _is_clone(here: Path, known: CodeSnapshot) -> bool:
    """Whether a folder stands for that of a run's code in another clone or work tree of its repository."""
    prefix = ask_git(here, "rev-parse", "--show-prefix").output
    place = b"" if known.place == "." else os.fsencode(f"{known.place}/")
    return prefix == place + b"\n" and ask_git(here, "cat-file", "-e", f"{known.commit}^{{commit}}").output is not None
