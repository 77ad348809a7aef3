"""A run's own copy of the code, in which a program of a sweep runs: hard links to the copy that the sweep's runs share.

A hard link takes no space and no inode. Its `__file__` is in the run directory, so a program that writes next to its
source files writes into its own run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from hpctrain.files import on_each_file, temporary_name
from hpctrain.run.code import CheckedCode, CodeSnapshot, check_code, list_of, read_files, write_files
from hpctrain.run.directory import RunDirectory
from hpctrain.run.written_files import written_files


def code_for_attempt(directory: RunDirectory) -> CheckedCode:
    """Return the checked code of an attempt that is about to start, and make the run's own copy if it needs one.

    Only the launcher of the attempt calls this, before the ranks start on any node.

    Raises:
        OSError: the file system is unavailable, or full.
        RunDirectoryError: a field of a record can't be.
    """
    code = check_code(directory)
    if code.copy is None or code.damage or code.copy.own_paths is None or code.copy == code.copy.as_own_copy:
        return code
    return CheckedCode(make_own_copy(code.copy))


def make_own_copy(code: CodeSnapshot) -> CodeSnapshot:
    """Make a run's own copy, complete or not at all; an existing one stays.

    Args:
        code: the copy that the runs of the sweep share.

    Returns:
        The run's own copy.

    Raises:
        OSError: it can't be written.
        RunDirectoryError: the list of the copy isn't one.
    """
    own_copy = code.as_own_copy
    with code.run.permissions():
        code.run.close_folder(code.run.code, 0o777)
        temporary = temporary_name(code.run.code / "copy")
        temporary.mkdir()
        try:
            paths = _make_folders(code, temporary)
            on_each_file(lambda path: _link(code.folder / path, temporary / path), paths)
            write_files(list_of(own_copy.folder), read_files(code.list))
            temporary.rename(own_copy.folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another launcher made it meanwhile
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return own_copy


def _make_folders(code: CodeSnapshot, target: Path) -> list[str]:
    """Make the folders of a copy; return the paths of its files and links.

    Runs that began with `run.cwd=shared` may have written into the shared copy, which may also link to folders that are
    the run's own here.
    """
    own_paths, outputs = set(code.own_paths or ()), set(written_files(code))
    prefixes, paths = [""], []
    while prefixes:
        prefix = prefixes.pop()
        with os.scandir(code.folder / prefix) as entries:
            for entry in entries:
                path = prefix + entry.name
                if path in outputs or (path in own_paths and entry.is_symlink()):
                    if path in own_paths and entry.is_dir():
                        (target / path).mkdir()
                elif entry.is_dir(follow_symlinks=False):
                    (target / path).mkdir()
                    prefixes.append(f"{path}/")
                else:
                    paths.append(path)
    return paths


def _link(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(os.readlink(source))  # noqa: PTH115 - Path.readlink would change its text
        return
    if not os.access(source, os.W_OK):  # root may write, and would change the files of the other runs
        with contextlib.suppress(OSError):  # between folders of BeeGFS and AFS, or of another member of the group
            target.hardlink_to(source)
            return
    shutil.copyfile(source, target)
    target.chmod(source.stat().st_mode & 0o777)
