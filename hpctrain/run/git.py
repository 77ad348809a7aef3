"""Questions to git, asked so that git executes nothing that a repository or the environment configures."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 5.0
SAFE = {"core.fsmonitor": "", "core.hooksPath": "/dev/null"}
"""Configuration of git in place of the repository's, which may name programs there."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What git answered.

    Attributes:
        output: its standard output; None if it failed.
        problem: why it failed, in one line; empty if it didn't.
    """

    output: bytes | None
    problem: str = ""


def ask_git(
    folder: Path, *arguments: str, instead: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> Answer:
    """Execute git in a folder.

    Args:
        folder: of a repository.
        arguments: the subcommand, which must not write, and its options.
        instead: more configuration in place of the repository's.
        timeout_s: the most seconds to wait; None for `TIMEOUT_S`.
    """
    # options, because git before 2.31 ignores GIT_CONFIG_COUNT
    settings = [part for key, value in {**SAFE, **(instead or {})}.items() for part in ("-c", f"{key}={value}")]
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    # a run without git, or on a file system where git is slow, starts all the same
    try:
        done = subprocess.run(
            ["git", "--no-pager", *settings, "-C", str(folder), *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"git {arguments[0]} took longer than {timeout_s:g} s")
    except (OSError, subprocess.SubprocessError) as error:
        return Answer(None, f"git can't be executed: {error}")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        return Answer(None, lines[0].removeprefix("fatal: ") or f"git {arguments[0]} failed")
    return Answer(done.stdout)


def _environment() -> dict[str, str]:
    """The environment in which git executes nothing that GIT_* variables name."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {
        "GIT_OPTIONAL_LOCKS": "0",  # otherwise git writes the index, and runs a hook
        "GIT_ALLOW_PROTOCOL": "none",  # a partial clone fetches what is missing, by a program of its configuration
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",  # the messages that a caller looks for
    }
