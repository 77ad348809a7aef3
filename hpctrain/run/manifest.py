"""The origin of a run: command, source, versions, host. Never the environment, which may hold secrets."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.files import open_file, read_json_or_empty
from hpctrain.run.directory import RunDirectory
from hpctrain.run.source_folder import git_state
from hpctrain.startup import __version__

PACKAGES = ("torch", "submitit", "hydra-core", "omegaconf", "tensorboard", "numpy")
HEAD_BYTES = 16 * 2**10
"""Bytes in which `varied` is looked for first: what precedes it is the command and a folder."""


def manifest(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """The content of ``manifest.json``.

    Args:
        command: the command line as typed.
        folder: the directory in which it was typed; the manifest describes its git repository.
    """
    return {
        "command": shlex.join(command),
        "folder": str(folder),
        "varied": {},  # a sweep's run has its values here
        "time": time.time(),
        "user": _user(),
        "host": socket.gethostname(),
        "git": git_state(folder),
        "versions": {"hpctrain": __version__, "python": platform.python_version(), **_versions()},
        "executable": sys.executable,
    }


def read_varied(directory: RunDirectory) -> dict[str, str]:
    """Read the keys that a run's sweep varied, with its values; empty for a run of its own."""
    varied = _varied_in_head(directory)
    if varied is None:
        varied = read_json_or_empty(directory.manifest).get("varied")
    return {str(key): str(value) for key, value in varied.items()} if isinstance(varied, dict) else {}


def _varied_in_head(directory: RunDirectory) -> object:
    """Return `varied` if the first bytes of the manifest have it, else None: a diff of up to a megabyte follows it."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open_file(directory.manifest) as file:
        # in the strings before it, such as the command, JSON escapes the quotes
        _, separator, json_text = file.read(HEAD_BYTES).decode(errors="ignore").partition('\n  "varied": ')
        return json.JSONDecoder().raw_decode(json_text)[0] if separator else None
    return None


def varied_text(varied: Mapping[str, str]) -> str:
    """Keys and values as they are typed: ``optimizer.lr=0.1 seed=1``."""
    return " ".join(f"{key}={value}" for key, value in varied.items())


class FloatWithText(float):
    """A number whose text isn't Python's, such as `1.10`."""

    source = ""


class IntWithText(int):
    """A whole number whose text isn't Python's, such as `+1`."""

    source = ""


def as_typed(value: object, text: str) -> object:
    """Return a number with the text that was typed, for `value_text`; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    number = FloatWithText(value) if isinstance(value, float) else IntWithText(value)
    number.source = text
    return number


def value_text(value: object) -> str:
    """A value as it is typed: `0.001`, `true`, `[0.9,0.99]`, `sgd`."""
    if isinstance(value, FloatWithText | IntWithText):
        return value.source
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str).replace(", ", ",").replace(": ", ":")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # in a container, the user may have no entry in /etc/passwd
        return str(os.getuid())


def _versions() -> dict[str, str]:
    import importlib.metadata  # it imports much, and `status` needs none of it

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
