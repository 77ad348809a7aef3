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
SAFE = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null"}
"""Configuration of git in place of the repository's, which may name programs there."""


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
    # a submodule's changes would be asked for with its own configuration, which may name programs, too
    options = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty")
    diff = _git(folder, "diff", *options, "HEAD", instead=_without_filters(folder)) or ""
    too_large = len(diff) > LARGEST_DIFF_BYTES
    return {"commit": commit.strip(), "diff": "" if too_large else diff, "diff_left_out": too_large}


def _without_filters(folder: Path) -> dict[str, str]:
    """Configuration that switches off the filters of this repository, for which git has no option."""
    keys = (_git(folder, "config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.") or "").split("\0")
    filters = {key.rpartition(".")[0] for key in keys if key}
    values = {"clean": "", "smudge": "", "process": "", "required": "false"}
    return {f"{name}.{key}": value for name in filters for key, value in values.items()}


def _git(folder: Path, *arguments: str, instead: Mapping[str, str] | None = None) -> str | None:
    # a run without git, or on a file system where git is slow, starts without these fields
    try:
        done = subprocess.run(
            ["git", "--no-pager", "-C", str(folder), *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT_S,
            check=True,
            env=_git_environment(SAFE | dict(instead or {})),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _git_environment(configuration: Mapping[str, str]) -> dict[str, str]:
    """The environment in which git executes nothing that the repository or GIT_* variables name."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # as variables they hold for submodules as well, and keys may contain any character
    for number, (key, value) in enumerate(configuration.items()):
        kept |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return kept | {
        "GIT_CONFIG_COUNT": str(len(configuration)),
        "GIT_OPTIONAL_LOCKS": "0",  # otherwise git writes the index, and runs a hook
        "GIT_ALLOW_PROTOCOL": "none",  # a partial clone fetches what is missing, by a program of its configuration
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }
