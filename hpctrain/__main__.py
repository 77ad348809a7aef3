"""``python -m hpctrain``, and the installed ``hpctrain``."""

import sys

from hpctrain.startup import exclude_working_directory


def main() -> int:
    """Run the command line; only the user's code can be imported from the working directory."""
    exclude_working_directory()
    # after that call: it imports much of the standard library, which must not come from the working directory
    from hpctrain.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
