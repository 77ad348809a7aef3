"""The working directory in Python's search path, for commands that train."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

original: Sequence[str] = ()
"""Python's search path at the start, before `hpctrain.__main__` removed the working directory from it."""


def include_working_directory() -> None:
    """Let Python import modules from the working directory, as `python -m` does: a task may be there.

    With PYTHONSAFEPATH, only if an entry of PYTHONPATH or of a .pth file names it.
    """
    for position, place in enumerate(original):
        if place not in sys.path:
            sys.path.insert(position, place)
    if not sys.flags.safe_path and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
