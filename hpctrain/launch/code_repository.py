"""The files of a launch's code in a git repository: those that git tracks, and those that it doesn't ignore."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpctrain.launch.code_choice import NEVER, Choice, CodeFiles, CodeFilesError, is_below, is_home, require_few_files
from hpctrain.launch.code_runs import Runs
from hpctrain.run.git import ask_git

LIST_TIMEOUT_S = 20.0
"""Seconds that git may take to find a repository, or to list its files, on a slow file system."""
FOREIGN = ("dubious ownership", "unsafe repository")
"""Parts of git's messages about a repository of another user."""
NO_REPOSITORY = "not a git repository (or any"
"""How git's message about a folder that isn't in a repository begins; one that is damaged has another."""
NO_WORK_TREE = "must be run in a work tree"
"""Part of git's message about its own files, such as a bare repository."""


def find_in_repository(
    folder: Path, exclude: Sequence[str], home: Path, include: Sequence[str] = ()
) -> CodeFiles | None:
    """Find the files that git knows.

    Args:
        folder: the working directory, without symbolic links.
        exclude: patterns of files and folders that aren't copied.
        home: the directory of the run or the sweep, which may be inside of the code.
        include: patterns of files that are copied although their names are usual for secrets.

    Returns:
        None outside of a repository, and where git ignores the folder itself.

    Raises:
        CodeFilesError: there is too much, or git fails.
    """
    answer = ask_git(folder, "rev-parse", "--show-toplevel", timeout_s=LIST_TIMEOUT_S)
    if answer.output is None:
        _refuse_unreadable(folder, answer.problem)
        return None
    root = Path(os.path.realpath(os.fsdecode(answer.output.removesuffix(b"\n"))))
    if is_home(root) or not folder.is_relative_to(root):
        return None  # a repository of configuration files: the rest of a home isn't code
    commit = ask_git(root, "rev-parse", "--verify", "-q", "HEAD", timeout_s=LIST_TIMEOUT_S).output
    here = folder.relative_to(root).as_posix()
    found = CodeFiles(root, here, None if commit is None else commit.decode().strip())
    chosen = Choice(exclude, include, root)
    repository = _Repository(found, chosen, Runs(root, home))
    repository.add_files("")
    found.secrets.update(chosen.secrets)
    if here != "." and repository.leaves_out(here):
        return None
    require_few_files(found, Counter(path.partition("/")[0] for path in found.copied))
    return found


def repository_with(folder: Path, commit: str) -> Path | None:
    """Return the repository that contains a folder; None outside of one, and if it doesn't have a commit."""
    if ask_git(folder, "cat-file", "-e", f"{commit}^{{commit}}", timeout_s=LIST_TIMEOUT_S).output is None:
        return None
    answer = ask_git(folder, "rev-parse", "--show-toplevel", timeout_s=LIST_TIMEOUT_S)
    return None if answer.output is None else Path(os.path.realpath(os.fsdecode(answer.output.removesuffix(b"\n"))))


def _refuse_unreadable(folder: Path, problem: str) -> None:
    """Refuse a folder that belongs to a repository, which git can't read; otherwise it isn't in one."""
    top = next((each for each in (folder, *folder.parents) if os.path.lexists(each / ".git")), None)
    if any(text in problem for text in FOREIGN):
        raise _foreign(folder, top or folder)
    if NO_WORK_TREE in problem:
        remedy = "change into a folder with checked-out files, or set code.snapshot=none"
        raise CodeFilesError(f"{folder} contains files of git itself, and no code", remedy)
    if top is not None and not is_home(top) and not problem.startswith(NO_REPOSITORY):
        remedy = "correct that, or copy no code with code.snapshot=none"
        raise CodeFilesError(f"git can't read the repository {top} ({problem})", remedy)


def _foreign(folder: Path, top: Path) -> CodeFilesError:
    remedy = f"trust it with `git config --global --add safe.directory {top}`, or set code.snapshot=none"
    return CodeFilesError(f"{folder} is in a git repository of another user", remedy)


class _Repository:
    """Collects the files of a repository, and of those inside of it.

    Args:
        found: gets the files.
        chosen: decides which are left out.
        runs: that aren't copied.
    """

    def __init__(self, found: CodeFiles, chosen: Choice, runs: Runs) -> None:
        self._found = found
        self._chosen = chosen
        self._runs = runs
        self._left_out: set[str] = set()
        self._behind_link: dict[str, bool] = {"": False}

    def add_files(self, prefix: str) -> None:
        """Add the files of one repository.

        Args:
            prefix: its path in the outermost one, with a slash at the end; empty for that itself.
        """
        known: list[str] = []
        others: list[str] = []
        for entry in self._listed(prefix, "-t", "-c", "-o"):
            # the tag of untracked files is a question mark
            (others if entry.startswith("?") else known).append(prefix + entry[2:])
        environments = _environments(others)
        ignored = self._listed(prefix, "-o", "-i", "--directory")
        linked = dict.fromkeys(prefix + path.removesuffix("/") for path in ignored)
        for path in dict.fromkeys(known):  # a file with a merge conflict is listed three times
            self._add(path, linked)
        for path in others:
            if environment := next((one for one in environments if is_below(path, one)), None):
                linked[environment] = None
            elif not self._runs.contain(path):
                self._add(path, linked)
                self._found.untracked.add(path)
        self._left_out |= linked.keys()
        self._add_folders(prefix)
        self._found.linked.extend(filter(self._runs.allow_link, linked))

    def leaves_out(self, folder: str) -> bool:
        """Whether the contents of a folder aren't copied."""
        return self._runs.contain_folder(folder) or any(is_below(folder, path) for path in self._left_out)

    def _add_folders(self, prefix: str) -> None:
        """Add the folders of one repository: git doesn't list those that are empty."""
        prefixes = [prefix]
        while prefixes:
            above = prefixes.pop()
            with contextlib.suppress(OSError):  # of another user, or removed meanwhile
                entries = list(os.scandir(f"{self._found.root}/{above}"))
                if above != prefix and any(entry.name == ".git" for entry in entries):
                    continue  # another repository
                folders = [f"{above}{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False)]
                folders = [path for path in folders if self._is_code(path)]
                self._found.folders.extend(folders)
                prefixes += [f"{path}/" for path in folders]

    def _is_code(self, folder: str) -> bool:
        """Whether a folder may contain code; for a folder below such folders."""
        is_left_out = (
            folder in self._left_out or self._chosen.left_out_folder(folder) or self._runs.contain_folder(folder)
        )
        return not is_left_out and folder.rpartition("/")[2] not in NEVER

    def _add(self, path: str, linked: dict[str, None]) -> None:
        path = path.removesuffix("/")  # of a repository that this one doesn't know
        if self._is_behind_link(path.rpartition("/")[0]):
            return
        try:
            state = os.lstat(f"{self._found.root}/{path}")
        except OSError:
            return  # deleted, or never checked out
        is_folder = stat.S_ISDIR(state.st_mode)
        if left_out := self._chosen.left_out_folder(path) if is_folder else self._chosen.left_out(path):
            linked[left_out] = None
            return
        if self._runs.contain_or_record(path):
            return
        if not is_folder:
            self._found.copied[path] = state.st_size
        elif (self._found.root / path / ".git").exists():  # it doesn't in a submodule that wasn't fetched
            self.add_files(f"{path}/")

    def _is_behind_link(self, folder: str) -> bool:
        """Whether a folder, or one above it, was replaced by a symbolic link, which is listed itself."""
        if (known := self._behind_link.get(folder)) is None:
            known = self._is_behind_link(folder.rpartition("/")[0])
            known = self._behind_link[folder] = known or os.path.islink(f"{self._found.root}/{folder}")  # noqa: PTH114
        return known

    def _listed(self, prefix: str, *options: str) -> list[str]:
        repository = self._found.root / prefix
        answer = ask_git(repository, "ls-files", "-z", "--exclude-standard", *options, timeout_s=LIST_TIMEOUT_S)
        if answer.output is not None:
            return os.fsdecode(answer.output).split("\0")[:-1]
        if any(text in answer.problem for text in FOREIGN):
            raise _foreign(repository, repository)
        remedy = "list large folders in .gitignore"
        if prefix and "took longer" not in answer.problem:
            inside = prefix.removesuffix("/")
            remedy = f"repair it with `git submodule update --init {inside}`, leave it out with code.exclude=[{inside}]"
        problem = f"git can't list the files of {repository} ({answer.problem})"
        raise CodeFilesError(problem, f"{remedy}, or set code.snapshot=none")


def _environments(files: Iterable[str]) -> list[str]:
    """Return the virtual environments among files that git neither tracks nor ignores."""
    return [path.rpartition("/")[0] for path in files if path.endswith("/pyvenv.cfg")]
