"""Python's search path: the folder where a command is typed is in it only while a command trains."""

from __future__ import annotations

import sys
from pathlib import Path


def include_working_directory() -> None:
    """Let Python find modules in the folder where the command was typed, as `python -m` does: a task may be there."""
    if not sys.flags.safe_path and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
