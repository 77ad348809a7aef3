"""The files that belong to the code of a launch: what git doesn't ignore, or else the small files of the folder.

One walk through the folders asks git only what it tracks and what it ignores. `git archive` has no untracked files and
no submodules; like `git stash create` and `git ls-files`, it has no empty folders, and includes environments and
secrets.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from hpctrain.config.code import Code
from hpctrain.config.command import INTERPRETERS
from hpctrain.errors import ConfigError
from hpctrain.phrases import scaled
from hpctrain.run.source_folder import ask_git, secret_folder, secret_part

PACKAGE = Path(__file__).resolve().parent.parent
"""hpctrain's own folder."""
MAX_FILES = 20_000
"""Largest number of files: more are data, and no file system copies them in a moment."""
SMALL_BYTES = 1_000_000
"""Outside of git, only files up to this size count as code."""
NEVER = ("__pycache__", ".git", ".hg", ".svn")
"""Names that are neither copied nor linked: caches that Python would believe, and histories."""
RECORDS = ("attempts", "attempts.jsonl", "jobs.jsonl", "code.jsonl")
"""What a run has beside its configuration."""
COPY = re.compile(r"(.*/)?code/(\.tmp-[^/]*|(damaged-)?[0-9a-f]{32}[^/]*)", re.DOTALL)
"""Paths of earlier copies and their lists: not all sweeps have a `sweep.json`."""
ENVIRONMENT = {"pyvenv.cfg", "conda-meta"}
"""What one of Python's environments contains."""
LIST_TIMEOUT_S = 20.0
"""Seconds that git may take to find a repository, or to list its files, on a slow file system."""
NO_REPOSITORY = "not a git repository (or any"
"""How git's message about a folder that isn't in a repository begins; one that is damaged has another."""
FOREIGN = ("dubious ownership", "owned by someone else")
"""Parts of git's messages about a repository of another user."""


@dataclass(frozen=True, slots=True)
class CodeFiles:
    """The files of a launch's code; paths are relative to the root.

    Attributes:
        root: of the repository, or the working directory; without symbolic links.
        place: of the working directory; `.` for the root.
        commit: of git; empty outside of a repository.
        tracked: files that git tracks, whether they exist or not; empty outside of a repository.
        copied: files and symbolic links, with their sizes in bytes; some may vanish.
        folders: of the code, those that are empty as well: a program may write into them. A link to a folder that has
            only `.gitkeep` would send outputs into the original, depending on whether it was empty at the launch.
        linked: files and folders that the code may use, and that aren't copied, such as a compiled module that git
            ignores. A folder is one link: data that are added later, or a file by which a user stops a program, show.
        secrets: those of them that aren't copied because their names are usual for passwords and keys.
    """

    root: Path
    place: str = "."
    commit: str = ""
    tracked: set[str] = field(default_factory=set)
    copied: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    linked: set[str] = field(default_factory=set)
    secrets: set[str] = field(default_factory=set)


def find_code(folder: Path, settings: Code, home: Path) -> CodeFiles:
    """Find the code of a launch.

    Args:
        folder: the working directory, without symbolic links.
        settings: what to copy.
        home: the directory of the run or the sweep, which may be inside of the code.

    Raises:
        ConfigError: there are too many files, git fails, or the folder isn't one of code.
    """
    root = repository_of(folder)
    if root is not None:
        commit = ask_git(root, "rev-parse", "--verify", "-q", "HEAD", timeout_s=LIST_TIMEOUT_S).output or b""
        code = CodeFiles(root, folder.relative_to(root).as_posix(), commit.decode().strip())
        _Search(code, settings, home, in_git=True).add_files()
        if code.place in {".", *code.folders}:
            _require_few(code, code.copied)
            return code
    # outside of a repository, or where git ignores the folder itself
    code = CodeFiles(folder)
    _Search(code, settings, home, in_git=False).add_files()
    return code


def repository_of(folder: Path) -> Path | None:
    """Return the root of the repository that contains a folder; None without one, and for that of a home.

    Raises:
        ConfigError: git can't read the repository.
    """
    answer = ask_git(folder, "rev-parse", "--show-toplevel", timeout_s=LIST_TIMEOUT_S)
    if answer.output is not None:
        root = Path(os.path.realpath(os.fsdecode(answer.output.removesuffix(b"\n"))))
        # the rest of a home with a repository of configuration files isn't code
        return None if is_home(root) or not folder.is_relative_to(root) else root
    top = next((path for path in (folder, *folder.parents) if os.path.lexists(path / ".git")), None)
    if top is not None and not is_home(top) and not answer.problem.startswith(NO_REPOSITORY):
        raise _unreadable(top, answer.problem)
    return None


def is_home(root: Path) -> bool:
    """Return whether a folder is the user's home or the root of the file system, rather than a folder of code."""
    # not Path.home(), which raises an error without HOME for a user without an entry in /etc/passwd, as in containers
    return root in (Path(os.path.realpath(os.path.expanduser("~"))), Path("/"))  # noqa: PTH111


def _unreadable(repository: Path, problem: str, inside: str = "") -> ConfigError:
    remedy = "correct that"
    if any(text in problem for text in FOREIGN):
        remedy = f"it belongs to another user: trust it with `git config --global --add safe.directory {repository}`"
    elif "ls-files took longer" in problem:
        remedy = "list large folders in .gitignore"
    elif inside:
        remedy = f"repair it with `git submodule update --init {inside}`, leave it out with code.exclude=[{inside}]"
    problem = f"git can't read the repository {repository} ({problem})"
    return refusal(problem, f"{remedy}, or copy no code with code.snapshot=none")


def refusal(problem: str, remedy: str) -> ConfigError:
    """Make the error for code that can't be copied."""
    return ConfigError("code.snapshot", "auto", problem, remedy)


class _Search:
    """Collects the files of a repository, of those inside of it, or of a folder that isn't in one.

    Args:
        code: gets the files.
        settings: decides which are left out. A pattern without a slash is compared with the names of files and
            folders, and one with a slash with their paths.
        home: the directory of the run or the sweep.
        in_git: whether git decides what is code.
    """

    def __init__(self, code: CodeFiles, settings: Code, home: Path, *, in_git: bool) -> None:
        self._code = code
        self._is_excluded = _matcher(settings.exclude)
        self._is_included = _matcher(settings.include)
        self._home = os.path.realpath(home)
        self._in_git = in_git
        self._ignored: set[str] = set()
        self._outside_git: list[str] = []

    def add_files(self) -> None:
        """Look through the folders, without those that are left out."""
        root = self._code.root
        if is_home(root):
            remedy = "change into the folder of your code, or set code.snapshot=none"
            raise refusal(f"{root} is not a folder of code", remedy)
        if self._home == os.fspath(root):
            remedy = "choose a folder in it, such as runs/NAME, or set code.snapshot=none"
            raise refusal(f"run_dir={root} is the folder of the code itself", remedy)
        folders = [""]
        while folders:
            folder = folders.pop()
            try:
                entries = sorted(os.scandir(root / folder), key=lambda entry: entry.name)
            except OSError:
                continue  # of another user, or removed meanwhile
            names = {entry.name for entry in entries}
            if folder and (_is_launch(names) or f"{root}/{folder}" == self._home):
                continue
            if folder and names & ENVIRONMENT:
                self._link(folder)
                continue
            if self._in_git and ".git" in names:
                self._ask_git(folder)
            if folder:
                self._code.folders.add(folder)
            prefix = f"{folder}/" if folder else ""
            folders += filter(None, [self._add(f"{prefix}{entry.name}", entry) for entry in entries])

    def _ask_git(self, folder: str) -> None:
        """Ask git which files of a repository it tracks, and which it ignores."""
        repository, prefix = self._code.root / folder, f"{folder}/" if folder else ""
        tracked = ask_git(repository, "ls-files", "-z", timeout_s=LIST_TIMEOUT_S)
        options = ("-z", "-o", "-i", "--exclude-standard", "--directory")
        ignored = ask_git(repository, "ls-files", *options, timeout_s=LIST_TIMEOUT_S)
        if tracked.output is None or ignored.output is None:
            raise _unreadable(repository, tracked.problem or ignored.problem, folder)
        self._code.tracked.update(f"{prefix}{path}" for path in os.fsdecode(tracked.output).split("\0")[:-1])
        paths = os.fsdecode(ignored.output).split("\0")[:-1]
        self._ignored.update(f"{prefix}{path.removesuffix('/')}" for path in paths)

    def _add(self, path: str, entry: os.DirEntry[str]) -> str:
        """Add an entry; return a folder that is to be searched."""
        is_folder = entry.is_dir(follow_symlinks=False)
        is_cache = entry.name in NEVER or (entry.name.endswith(".pyc") and path not in self._code.tracked)
        if is_cache or COPY.fullmatch(path):
            return ""
        is_hidden = not self._in_git and is_folder and entry.name.startswith(".")
        if path in self._ignored or self._is_left_out(path, is_folder) or is_hidden:
            self._link(path)
            return ""
        if not self._in_git:
            # folders and large files as well, which bounds the search
            self._outside_git.append(path)
            _require_few(self._code, self._outside_git)
        if is_folder:
            return path
        if entry.is_symlink() or entry.is_file():
            with contextlib.suppress(OSError):  # removed meanwhile
                size = 0 if entry.is_symlink() else entry.stat().st_size
                if self._in_git or size <= SMALL_BYTES:
                    self._code.copied[path] = size
                else:
                    self._link(path)
        return ""

    def _is_left_out(self, path: str, is_folder: bool) -> bool:
        """Whether the user, or a name that is usual for secrets, leaves a file or a folder out; hpctrain is, too."""
        if self._is_excluded(path) or f"{self._code.root}/{path}" == str(PACKAGE):
            return True
        secret = secret_folder(path) if is_folder else secret_part(path)
        if is_secret := bool(secret) and not any(map(self._is_included, parts(path))):
            self._code.secrets.add(path)
        return is_secret

    def _link(self, path: str) -> None:
        # a link to a folder that contains the copy would send tools that follow links around in circles
        if not is_below(f"{self._home}/code", f"{self._code.root}/{path}"):
            self._code.linked.add(path)


def _require_few(code: CodeFiles, paths: Collection[str]) -> None:
    if len(paths) > MAX_FILES:
        largest, count = Counter(path.partition("/")[0] for path in paths).most_common(1)[0]
        raise _too_much(code, f"{MAX_FILES:,} files", largest, f"{count:,}")


def require_size(code: CodeFiles, max_bytes: float) -> None:
    """Refuse code that is too large.

    Raises:
        ConfigError: it has more than `max_bytes`.
    """
    sizes: Counter[str] = Counter()
    for path, size in code.copied.items():
        # outside of git, many small files add up
        sizes[path if code.tracked else path.partition("/")[0]] += size
    if sizes.total() > max_bytes:
        largest, size = sizes.most_common(1)[0]
        bound = f"code.max_mb={max_bytes / 1e6:g} MB"
        raise _too_much(code, bound, largest, scaled(size, "B"), ", raise code.max_mb")


def _too_much(code: CodeFiles, bound: str, largest: str, amount: str, remedy: str = "") -> ConfigError:
    remedy = f"leave it out with code.exclude=[{largest}] or a line in .gitignore{remedy}"
    problem = f"the code in {code.root} has more than {bound}, {largest} alone {amount}"
    return refusal(problem, f"{remedy}, or copy no code with code.snapshot=none")


def _is_launch(names: set[str]) -> bool:
    """Whether a folder with these names is a run or a sweep; a configuration alone may be anything's.

    Not by the folder's own name: users keep scripts in `runs/` and `experiments/`. A user's files beside the runs of a
    sweep aren't told apart from hpctrain's, and aren't copied.
    """
    is_run = "config.yaml" in names and not names.isdisjoint(RECORDS)
    is_sweep = "sweep.json" in names and any(map(str.isdecimal, names))
    return is_run or is_sweep or {"attempts", "checkpoints", "logs"} <= names


def exclude_own_folders(code: CodeFiles, patterns: Sequence[str]) -> list[str]:
    """Exclude the folders into which a program writes from the code, since each run has its own.

    Their names decide, since it can't be known in advance into which ignored folders a program writes.

    These are the folders that match a pattern, and ignored ones without files. Tracked files in them stay in the code,
    and so does a folder that contains scripts.

    Args:
        code: of the program; gets empty folders in their place.
        patterns: of the folders, as in `code.exclude`.

    Returns:
        The paths of the excluded folders, and of files that match a pattern.
    """
    matches = _matcher(patterns)
    scripts = [path for path in code.copied if Path(path).suffix in INTERPRETERS]
    with_scripts = {part for path in (*scripts, code.place) for part in parts(path)}

    def own_part(path: str) -> str:
        return next((part for part in parts(path) if part not in with_scripts and matches(part)), "")

    def is_output(path: str) -> bool:
        # a link in the place of a folder leads to other storage
        return path not in code.tracked or (matches(path) and os.path.islink(code.root / path))  # noqa: PTH114

    own_parts = {path: own_part(path) for path in code.copied if is_output(path)}
    own_parts |= {path: own_part(path) or (path if is_empty(code.root / path) else "") for path in code.linked}
    own_paths = sorted({*own_parts.values()} - {""})
    for path in (path for path, part in own_parts.items() if part):
        code.copied.pop(path, None)
        code.linked.discard(path)
    code.folders.difference_update([path for path in code.folders if any(is_below(path, part) for part in own_paths)])
    code.folders.update(part for part in own_paths if (code.root / part).is_dir())
    return own_paths


def is_empty(folder: Path) -> bool:
    """Whether a folder contains no files at any depth, apart from `.gitkeep`."""

    def has_no_file(entry: os.DirEntry[str]) -> bool:
        return entry.name == ".gitkeep" or (entry.is_dir(follow_symlinks=False) and is_empty(Path(entry.path)))

    try:
        with os.scandir(folder) as entries:
            return all(map(has_no_file, entries))
    except OSError:
        return False  # a file, or a folder of another user


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function of the path of a file or a folder: whether it matches one of the patterns."""
    plain = [pattern.removesuffix("/") for pattern in patterns]
    of_names = [fnmatch.translate(pattern) for pattern in plain if "/" not in pattern]
    of_paths = [fnmatch.translate(pattern.removeprefix("/")) for pattern in plain if "/" in pattern]
    names, paths = (re.compile("|".join(texts) or r"(?!)") for texts in (of_names, of_paths))
    return lambda path: bool(names.fullmatch(path.rpartition("/")[2]) or paths.fullmatch(path))


def parts(path: str) -> Iterable[str]:
    """The folders above a path, outermost first, and the path itself."""
    return accumulate(path.split("/"), "{}/{}".format)


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder, or inside of it."""
    return path == folder or path.startswith(f"{folder}/")
