"""``python -m hpctrain``, and the installed ``hpctrain``."""

import os
import sys


def main() -> int:
    """Run the command line; only commands that train can import modules from the working directory."""
    original = list(sys.path)
    exclude_working_directory()
    # after that call: these import much of the standard library, which must not come from the working directory
    from hpctrain.cli import main as run
    from hpctrain.cli import search_path

    search_path.original = original
    return run()


def exclude_working_directory() -> None:
    """Remove the working directory from Python's search path.

    `python -m` searches it first, and an empty entry in PYTHONPATH stands for it too. It may belong to another user,
    and contain a file such as json.py, which Python would execute. Commands that train put it back
    (`search_path.include_working_directory`).
    """
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was removed
        return
    own = tuple(os.path.join(os.path.realpath(prefix), "") for prefix in (sys.prefix, sys.base_prefix))
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here or here.startswith(own)]


if __name__ == "__main__":
    sys.exit(main())
