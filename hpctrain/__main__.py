"""``python -m hpctrain``, and the installed ``hpctrain``."""

import os
import sys


def main() -> int:
    """Run the command line; modules of the folder where it was typed are found only once a command trains."""
    exclude_working_directory()
    # imports a good part of the standard library, which must not come from that folder
    from hpctrain.cli import main as run

    return run()


def exclude_working_directory() -> None:
    """Remove the folder where the command was typed from Python's search path.

    `python -m` searches it first, and an empty entry in PYTHONPATH means it, too. It may be another user's, with a file
    such as json.py.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was removed
        return
    own = tuple(os.path.join(os.path.realpath(prefix), "") for prefix in (sys.prefix, sys.base_prefix))
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here or here.startswith(own)]


if __name__ == "__main__":
    sys.exit(main())
