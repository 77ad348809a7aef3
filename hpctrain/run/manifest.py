"""The origin of a run: command, source, versions, host. Never the environment, which may hold secrets."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hpctrain
from hpctrain.files import read_json_or_empty
from hpctrain.run.directory import RunDirectory

PACKAGES = ("torch", "submitit", "hydra-core", "omegaconf", "tensorboard", "numpy")
LARGEST_DIFF_BYTES = 1_000_000
GIT_TIMEOUT_S = 5.0


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
        "git": _git_state(folder),
        "versions": {"hpctrain": hpctrain.__version__, "python": platform.python_version(), **_versions()},
        "executable": sys.executable,
    }


def read_varied(directory: RunDirectory) -> dict[str, str]:
    """Read the keys that a run's sweep varied, with its values; empty for a run of its own."""
    varied = read_json_or_empty(directory.manifest).get("varied")
    return {str(key): str(value) for key, value in varied.items()} if isinstance(varied, dict) else {}


def varied_text(varied: Mapping[str, str]) -> str:
    """Keys and values as they are typed: ``optimizer.lr=0.1 seed=1``."""
    return " ".join(f"{key}={value}" for key, value in varied.items())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # in a container, the user may have no entry in /etc/passwd
        return str(os.getuid())


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_state(folder: Path) -> dict[str, Any] | None:
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "HEAD") or ""
    too_large = len(diff) > LARGEST_DIFF_BYTES
    return {"commit": commit.strip(), "diff": "" if too_large else diff, "diff_left_out": too_large}


def _git(folder: Path, *arguments: str) -> str | None:
    # a run without git, or on a file system where git is slow, starts without these fields
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
