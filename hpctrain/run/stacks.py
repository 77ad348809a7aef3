"""Stacks on request: a command writes a request into the attempt's claim, and the ranks answer in the run's logs.

This needs a file system that all sides share, but neither a signal (SIGUSR1 is a stop) nor a connection to the nodes.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_bytes, write_atomic


def request_stacks(request: Path) -> str:
    """Ask the ranks of an attempt for their stacks.

    Args:
        request: `RunDirectory.stacks_request` of the attempt.

    Returns:
        The token that marks the answers.

    Raises:
        RunDirectoryError: the request can't be written.
    """
    # not the time: the clocks of the nodes may differ, and earlier answers are in the same file
    token = secrets.token_hex(4)
    try:
        write_atomic(request, token, durable=False)
    except OSError as error:
        raise RunDirectoryError(
            f"{request}: can't be written ({error.strerror}); ask as a user who may write into the run directory"
        ) from error
    return token


class StacksRequests:
    """The requests to one attempt, as a rank sees them; a check without a new request costs one stat.

    Args:
        path: the request file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_state: tuple[int, int] | None = None

    def new(self) -> str | None:
        """The token of a request that this rank hasn't seen yet; None without one."""
        try:
            status = self._path.stat()
            if (status.st_ino, status.st_mtime_ns) == self._last_state:
                return None
            token = read_bytes(self._path).decode()
        except (OSError, UnicodeDecodeError):
            return None
        # a request replaces the file, so its inode changes even if two requests have the same modification time
        self._last_state = (status.st_ino, status.st_mtime_ns)
        return token


def framed(title: str, token: str) -> tuple[str, str]:
    """The lines before and after an answer, which identify it and show that it is complete."""
    return f"==== {title} [{token}]\n", f"==== end [{token}]\n"


def answer(path: Path, token: str) -> str | None:
    """A rank's answer to a request; None until it is complete."""
    try:
        text = read_bytes(path).decode(errors="replace")
    except OSError:
        return None
    begin = text.find(f" [{token}]\n")
    end = text.find(f"==== end [{token}]\n")
    if begin < 0 or end < begin:
        return None
    return text[text.rfind("====", 0, begin) : end]
