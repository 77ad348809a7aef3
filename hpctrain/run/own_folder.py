"""The folder of its own in which a program of a sweep runs: hard links to the copy of the code that the runs share.

A hard link takes no space and no inode. By `__file__`, it is in the run's folder, so what a program writes beside its
own files is in there, too.
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
    """Return the checked code of an attempt that is about to start, in a folder of the run's own if it needs one.

    Only the launcher of the attempt calls this, before the ranks start on any node.

    Raises:
        OSError: the file system is unavailable, or full.
        RunDirectoryError: a field of a record can't be.
    """
    code = check_code(directory)
    if code.copy is None or code.damage or code.copy.own is None or code.copy == code.copy.in_run:
        return code
    return CheckedCode(make_own_folder(code.copy))


def make_own_folder(code: CodeSnapshot) -> CodeSnapshot:
    """Make a run's own folder, complete or not at all; one that is there stays.

    Args:
        code: the copy that the runs of the sweep share.

    Returns:
        The same in the run's own folder.

    Raises:
        OSError: it can't be written.
        RunDirectoryError: the list of the copy isn't one.
    """
    own = code.in_run
    with code.run.permissions():
        code.run.close_folder(code.run.code, 0o777)
        temporary = temporary_name(code.run.code / "copy")
        temporary.mkdir()
        try:
            paths = _make_folders(code, temporary)
            on_each_file(lambda path: _link(code.folder / path, temporary / path), paths)
            write_files(list_of(own.folder), read_files(code.list))
            temporary.rename(own.folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another launcher made it meanwhile
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return own


def _make_folders(code: CodeSnapshot, target: Path) -> list[str]:
    """Make the folders of a copy; return the paths of its files and links.

    Runs that began with `run.cwd=shared` may have written into the copy, and made it with links to what is own here.
    """
    own, written = set(code.own or ()), set(written_files(code))
    prefixes, paths = [""], []
    while prefixes:
        prefix = prefixes.pop()
        with os.scandir(code.folder / prefix) as entries:
            for entry in entries:
                path = prefix + entry.name
                if path in written or (path in own and entry.is_symlink()):
                    if path in own and entry.is_dir():
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
