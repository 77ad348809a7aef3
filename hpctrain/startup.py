"""Facts known at the first import of the package: its version, when Python started, and Python's search path.

The working directory stays out of the search path until this process imports the user's code. This module imports
nothing that Python doesn't load at its start: it could come from the working directory.
"""

import os
import sys
import time

__version__ = "0.1.0"

# Not the start time in /proc (proc(5)): `bash -c "a && b"` replaces itself by its last command, which then inherits the
# shell's start time. CPU time counts only Python's own work before this line; any time it spent waiting is unknown.
PYTHON_STARTED_S = time.monotonic() - time.process_time()
"""When Python started in this process: seconds on the monotonic clock."""

_original: list[str] = []


def exclude_working_directory() -> None:
    """Remove the working directory from Python's search path.

    `python -m` searches it first, and an empty entry in PYTHONPATH stands for it too. It may belong to another user,
    and contain a file such as json.py, which Python would execute.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was removed
        return
    if not _original:
        _original[:] = sys.path
    prefixes = tuple(os.path.join(os.path.realpath(prefix), "") for prefix in (sys.prefix, sys.base_prefix))
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here or here.startswith(prefixes)]


def with_working_directory() -> list[str]:
    """Return the search path with the working directory, as `python -m` has it, for importing the user's code.

    With PYTHONSAFEPATH, it is in there only if an entry of PYTHONPATH or of a .pth file names it.
    """
    places = list(sys.path)
    for position, place in enumerate(_original):
        # as often as before: `is_found_here` counts the entries
        if places.count(place) < _original[: position + 1].count(place):
            places.insert(position, place)
    if not sys.flags.safe_path and (here := os.getcwd()) not in places:
        places.insert(0, here)
    return places


def is_found_here() -> bool:
    """Return whether Python finds hpctrain in the working directory alone, as in a checkout that isn't installed."""
    parent = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    places = [place for place in with_working_directory() if place and os.path.realpath(place) == parent]
    # `python -m` puts the working directory first
    return parent == os.getcwd() and len(places) < 2
