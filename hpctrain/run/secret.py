"""The secret by which the ranks of an attempt recognise each other; only their user can read it.

It is a file, and not a variable of the environment, which users print into logs that others may read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hpctrain.errors import RendezvousError
from hpctrain.files import read_bytes, write_atomic, write_new
from hpctrain.retry import retry

VARIABLE = "HPCTRAIN_SECRET"
FILE_NAME = "secret"
SHORTEST = 16
"""Characters of a user's secret; an intruder who reads the store can test guesses at leisure."""
VISIBLE_S = 60.0
"""Seconds in which a file that another node wrote becomes visible on a network file system."""


def write_secret(claim: Path) -> None:
    """Write the secret of an attempt into its claim, for the ranks that a launcher starts.

    Raises:
        OSError: the file system's error.
    """
    write_atomic(claim / FILE_NAME, _new_secret(), mode=0o600)


def read_secret(claim: Path) -> bytes:
    """Read the secret of an attempt.

    Raises:
        RendezvousError: it can't be read.
    """
    path = claim / FILE_NAME
    try:
        read = partial(read_bytes, path)
        return retry(read, on=FileNotFoundError, for_s=VISIBLE_S, problem="no secret of the attempt yet")
    except OSError as error:
        raise RendezvousError(
            f"the secret of this attempt, {path}, can't be read ({error.strerror}); the ranks must see the run "
            "directory, and run as the launcher's user"
        ) from error


def discard_secret(claim: Path) -> None:
    """Remove the secret of an attempt, once all of its ranks have met."""
    with contextlib.suppress(OSError):
        (claim / FILE_NAME).unlink(missing_ok=True)


def user_secret(variables: Mapping[str, str]) -> bytes:
    """The secret of this user, for ranks that were started by hand: `HPCTRAIN_SECRET`, or a file in their home.

    The first rank that needs the file creates it: ``hpctrain/secret`` in `XDG_CONFIG_HOME` or ``~/.config``.

    Args:
        variables: of the environment.

    Raises:
        RendezvousError: the file can't be created or read, another user owns it or can read it, or the secret is short.
    """
    if (secret_text := variables.get(VARIABLE)) is not None:
        return _long_enough(secret_text.encode(), VARIABLE)
    remedy = f"set {VARIABLE} to the same value on all ranks"
    try:
        path = Path(variables.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hpctrain" / FILE_NAME
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # ranks that start together all come here
            write_new(path, _new_secret(), mode=0o600)
        with path.open("rb") as file:
            secret, status = file.read(), os.fstat(file.fileno())
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise RendezvousError(f"ranks that were started by hand need a secret, and {error}; {remedy}") from error
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    if mode & 0o077:
        raise RendezvousError(f"{path} has the permissions {mode:o}, expected 600; remove it, or {remedy}")
    if status.st_uid != user:
        raise RendezvousError(f"{path} belongs to the user {status.st_uid}, expected {user}; remove it, or {remedy}")
    return _long_enough(secret, str(path))


def _long_enough(secret: bytes, place: str) -> bytes:
    if (length := len(secret.strip())) < SHORTEST:
        raise RendezvousError(
            f"{place} has {length} characters, expected {SHORTEST} or more, chosen at random; "
            "generate them with `openssl rand -hex 32`"
        )
    return secret


def _new_secret() -> str:
    return secrets.token_hex(32)
