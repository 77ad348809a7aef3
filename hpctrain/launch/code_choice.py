"""Which files of a launch's code are copied into the run, and which are left where they are."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from hpctrain.config.scripts import INTERPRETERS
from hpctrain.errors import HpctrainError
from hpctrain.phrases import scaled
from hpctrain.run.secret_files import secret_folder, secret_part

PACKAGE = Path(__file__).resolve().parent.parent
"""hpctrain's own folder."""
MAX_FILES = 20_000
"""Largest number of copied files: more are data, and no file system copies them in a moment."""
NEVER = ("__pycache__", ".git", ".hg", ".svn")
"""Names that are neither copied nor linked: caches that Python would believe, and histories."""


class CodeFilesError(HpctrainError):
    """Code that can't be found or copied.

    Args:
        problem: what is in the way.
        remedy: what to do.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}")


@dataclass(frozen=True, slots=True)
class CodeFiles:
    """The files of a launch's code; paths are relative to the root.

    Attributes:
        root: of the repository, or the working directory; without symbolic links.
        working_directory: `.` for the root.
        commit: of git; None outside of a repository.
        copied: files and symbolic links, with their sizes in bytes; some may vanish.
        untracked: the copied files that git doesn't track; outside of a repository, all of them.
        folders: of the code, those that are empty as well: a program may write into them.
        linked: files and folders that the code may use, and that aren't copied.
        secrets: those of them that aren't copied because their names are usual for passwords and keys.
    """

    root: Path
    working_directory: str
    commit: str | None = None
    copied: dict[str, int] = field(default_factory=dict)
    untracked: set[str] = field(default_factory=set)
    folders: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)
    secrets: set[str] = field(default_factory=set)


class Choice:
    """Decides which files are left out, by patterns as in `fnmatch`.

    A pattern without a slash is compared with the names of the file and of each folder above it, and one with a slash
    with their paths. hpctrain itself is left out, too: it runs as it is installed. So are files whose names are usual
    for secrets (`hpctrain.run.secret_files`).

    Args:
        exclude: the user's patterns.
        include: the user's patterns of files that hold no secrets.
        root: of the code.

    Attributes:
        secrets: what was left out because of its name.
    """

    def __init__(self, exclude: Sequence[str], include: Sequence[str], root: Path) -> None:
        self.secrets: set[str] = set()
        self._matches = _matcher(exclude)
        self._is_included = _matcher(include)
        self._folders: dict[str, str] = {"": ""}
        if PACKAGE.is_relative_to(root):
            place = PACKAGE.relative_to(root).as_posix()
            self._folders[place] = place

    def left_out(self, path: str) -> str:
        """Return the first part of a file's path that is left out: itself, or a folder above it; else nothing."""
        if above := self.left_out_folder(path.rpartition("/")[0]):
            return above
        return path if self._matches(path) or self._is_secret(path, secret_part(path)) else ""

    def left_out_folder(self, path: str) -> str:
        """Return the first part of a folder's path that is left out; else nothing."""
        if (known := self._folders.get(path)) is None:
            known = self.left_out_folder(path.rpartition("/")[0])
            if not known and (self._matches(path) or self._is_secret(path, secret_folder(path))):
                known = path
            self._folders[path] = known
        return known

    def _is_secret(self, path: str, secret: str) -> bool:
        if not secret or any(map(self._is_included, _parts(path))):
            return False
        self.secrets.add(path)
        return True


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that says whether the path of a file or a folder matches one of the patterns."""
    plain = [pattern.removesuffix("/") for pattern in patterns]
    names = _regex(pattern for pattern in plain if "/" not in pattern)
    paths = _regex(pattern.removeprefix("/") for pattern in plain if "/" in pattern)
    return lambda path: bool(names.fullmatch(path.rpartition("/")[2]) or paths.fullmatch(path))


def _regex(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


def exclude_own_folders(code: CodeFiles, patterns: Sequence[str]) -> list[str]:
    """Exclude the folders into which a program writes from the code, since each run has its own.

    These are the folders that match a pattern, and ignored ones without files. Tracked files in them stay in the code,
    and so does a folder that contains scripts.

    Args:
        code: of the program; gets empty folders in their place.
        patterns: of the folders, as for `Choice`.

    Returns:
        The paths of the excluded folders, and of files that match a pattern.
    """
    matches = _matcher(patterns)
    scripts = [path for path in code.copied if Path(path).suffix in INTERPRETERS]
    with_scripts = {part for path in (*scripts, code.working_directory) for part in _parts(path)}

    def own_part(path: str) -> str:
        return next((part for part in _parts(path) if part not in with_scripts and matches(part)), "")

    def is_output(path: str) -> bool:
        # a link in the place of a folder leads to other storage
        return path in code.untracked or (matches(path) and os.path.islink(code.root / path))  # noqa: PTH114

    parts = {path: own_part(path) for path in code.copied if is_output(path)}
    for path in code.linked:
        parts[path] = own_part(path) or (path if is_empty(code.root / path) else "")
    code.linked[:] = [path for path in code.linked if not parts[path]]
    for path in [path for path in code.copied if parts.get(path)]:
        del code.copied[path]
    own_paths = sorted({*parts.values()} - {""})
    outside = [path for path in code.folders if not any(is_below(path, part) for part in own_paths)]
    code.folders[:] = [*outside, *(part for part in own_paths if (code.root / part).is_dir())]
    return own_paths


def names_own(word: str, root: Path, patterns: Sequence[str]) -> bool:
    """Whether a word of a command, such as `--out=/PROJECT/outputs`, leads past each run's own folder by its path.

    Args:
        word: of the command.
        root: of the code.
        patterns: as for `take_out_own`.
    """
    path = Path(os.path.normpath(word[word.find("/") :]))
    is_inside = re.match("/|-?-[^/]*=/", word) is not None and path.is_relative_to(root)
    return is_inside and any(map(_matcher(patterns), _parts(path.relative_to(root).as_posix())))


def is_empty(folder: Path) -> bool:
    """Whether a folder contains no files at any depth, apart from `.gitkeep`."""

    def has_no_file(entry: os.DirEntry[str]) -> bool:
        return entry.name == ".gitkeep" or (entry.is_dir(follow_symlinks=False) and is_empty(Path(entry.path)))

    try:
        with os.scandir(folder) as entries:
            return all(map(has_no_file, entries))
    except OSError:
        return False  # a file, or a folder of another user


def _parts(path: str) -> Iterable[str]:
    """The folders above a path, outermost first, and the path itself."""
    return accumulate(path.split("/"), "{}/{}".format)


def is_home(root: Path) -> bool:
    """Return whether a folder is the user's home or the root of the file system, rather than a folder of code."""
    # not Path.home(), which raises an error without HOME for a user without an entry in /etc/passwd, as in containers
    return root in (Path(os.path.realpath(os.path.expanduser("~"))), Path("/"))  # noqa: PTH111


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder, or inside of it; both are relative to the same root."""
    return folder in (".", path) or path.startswith(f"{folder}/")


def too_many_bytes(found: CodeFiles, sizes: Counter[str], max_bytes: float) -> CodeFilesError:
    """Make the error for code that is too large; ``sizes`` are by the file or folder to name."""
    largest, size = max(sizes.items(), key=lambda item: item[1])
    where = f"the code in {found.root} has more than code.max_mb={max_bytes / 1e6:g} MB, {largest} alone"
    return CodeFilesError(
        f"{where} {scaled(size, 'B')}",
        f"{_leave_out(largest)}, raise code.max_mb, or copy no code with code.snapshot=none",
    )


def require_few_files(found: CodeFiles, counts: Counter[str]) -> None:
    """Refuse code that has too many files.

    Args:
        found: the code.
        counts: its files, by the file or folder to name.

    Raises:
        CodeFilesError: there are more than `MAX_FILES`.
    """
    if counts.total() <= MAX_FILES:
        return
    largest, count = max(counts.items(), key=lambda item: item[1])
    raise CodeFilesError(
        f"the code in {found.root} has more than {MAX_FILES:,} files, {largest} alone {count:,}",
        f"{_leave_out(largest)}, or copy no code with code.snapshot=none",
    )


def _leave_out(path: str) -> str:
    return f"leave it out with code.exclude=[{path}] or a line in .gitignore"
