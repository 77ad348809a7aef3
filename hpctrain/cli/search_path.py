"""The working directory in Python's search path, for commands that train."""

from __future__ import annotations

import sys
from pathlib import Path


def include_working_directory() -> None:
    """Let Python import modules from the working directory, as `python -m` does: a task may be there."""
    if not sys.flags.safe_path and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
