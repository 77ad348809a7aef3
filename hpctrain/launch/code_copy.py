"""Copy the code of a launch into the run or the sweep, under a name that its contents decide."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.code import Code
from hpctrain.errors import RunDirectoryError
from hpctrain.files import errors_naming, on_each_file, temporary_name
from hpctrain.launch.code_files import (
    CodeFiles,
    CodeFilesError,
    exclude_own_folders,
    find_code,
    is_empty,
    parts,
    require_size,
)
from hpctrain.phrases import listed
from hpctrain.run.code import CodeFile, CodeSnapshot, describe_file, digest_of, repair, write_files
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import explain
from hpctrain.streams import Printer, print_warning


def copy_code(
    folder: Path,
    settings: Code,
    home: RunDirectory,
    mode: int,
    *,
    own_folders: Sequence[str] | None = None,
    warn: Printer = print_warning,
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
        CodeFilesError: the code can't be found or read, or there is too much.
        RunDirectoryError: the copy can't be written.
    """
    files = find_code(Path(os.path.realpath(folder)), settings, home.path)
    own_paths = None if own_folders is None else tuple(exclude_own_folders(files, own_folders))
    if own_paths is None and not files.copied:
        return None
    require_size(files, settings.max_mb * 1e6)
    with home.permissions(mode):
        home.close_folder(home.code, mode)
        try:
            code, repaired = _publish(files, home, own_paths)
        except OSError as error:
            raise RunDirectoryError(
                f"run_dir={home.path}: the code can't be copied there ({explain(error)}); make room, choose "
                "a folder that you may write to, or copy no code with code.snapshot=none"
            ) from error
    if secrets := sorted(files.secrets):
        warn(
            f"{listed(secrets)}: not copied with the code, since such names are usual for passwords and keys; the "
            f"run finds the originals through links. To copy one: code.include=[{secrets[0]}]"
        )
    warn_of_repair(code, repaired, warn)
    if filled := [path for path in own_paths or () if not is_empty(files.root / path)]:
        remedy = "if the program reads what is in yours, set run.cwd=shared, or run.own_folders without that name"
        warn(f"each run has its own {listed(filled)}, empty at first; {remedy}")
    return code


def warn_of_repair(code: CodeSnapshot, files: Sequence[str], warn: Printer) -> None:
    """Name the damaged files of a copy that were replaced."""
    if files:
        remedy = "today's files take their place, and what was there is named NAME.damaged-..."
        warn(f"{code.folder} was changed since it was taken ({listed(files)}): {remedy}")


def _publish(
    files: CodeFiles, home: RunDirectory, own_paths: tuple[str, ...] | None
) -> tuple[CodeSnapshot, Sequence[str]]:
    """Make a copy under a temporary name and rename it; repair one of the same code instead, if there is one.

    Returns:
        The copy, and the damaged files that were replaced.
    """
    temporary = temporary_name(home.code / "copy")
    temporary.mkdir()
    try:
        copied = _copy(files, temporary)
        digest = digest_of(copied)
        code = CodeSnapshot(
            run=home,
            digest=digest,
            folder=home.code / digest,
            root=files.root,
            place=files.working_directory,
            commit=files.commit or "",
            files=len(copied),
            bytes=sum(file.size for file in copied),
            own_paths=own_paths,
        )
        write_files(code.list, copied)
        try:
            temporary.rename(code.folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            repaired = repair(code, temporary)
            _add_folders_and_links(files, code.folder)
            return code, repaired
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # nothing of it is left after the renaming
    return code, ()


def _copy(files: CodeFiles, target: Path) -> Sequence[CodeFile]:
    """Copy all files, and link to what isn't copied; return what was copied."""
    for folder in {files.working_directory, *(path.rpartition("/")[0] for path in files.copied)}:
        (target / folder).mkdir(parents=True, exist_ok=True)
    _add_folders_and_links(files, target)
    copied = on_each_file(lambda path: _copy_one(files, path, target / path), list(files.copied))
    return [file for file in copied if file is not None]


def _copy_one(files: CodeFiles, path: str, target: Path) -> CodeFile | None:
    """Copy a file or a symbolic link; None if it vanished."""
    try:
        if not files.copied[path] and (files.root / path).is_symlink():
            target.symlink_to(_link_text(files, path))
            return describe_file(target, path)
        source = (files.root / path).open("rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except PermissionError as error:
        problem = f"{path} can't be read ({error.strerror})"
        raise CodeFilesError(problem, f"correct its permissions, or leave it out with code.exclude=[{path}]") from error
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
    target = os.path.normpath(link.parent / os.readlink(link))  # noqa: PTH115 - Path.readlink would change its text
    real = Path(os.path.realpath(target))
    if not real.is_relative_to(files.root):
        return target
    inside = real.relative_to(files.root).as_posix()
    is_copied = any(part in files.copied or part in files.linked for part in parts(inside))
    if is_copied or inside == "." or inside in files.folders or not real.exists():
        return os.path.relpath(real, link.parent)
    return target


def _add_folders_and_links(files: CodeFiles, target: Path) -> None:
    """Make the folders, and links to what isn't copied, unless the copy has something in their place."""
    for path in sorted(files.folders | files.linked):
        place = target / path
        # not in a folder that the program moved elsewhere, and replaced by a link
        if os.path.lexists(place) or not place.parent.resolve().is_relative_to(target.resolve()):
            continue
        with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
            if path in files.linked:
                place.symlink_to(files.root / path)
            else:
                place.mkdir()
