"""Watch the runs under a folder, live.

examples:
  python -m hpctrain top                 # all runs under runs/
  python -m hpctrain top sweep           # those under runs/sweep

Shows state, progress, time left, a metric with its course, job, node and reason of each run; sorts, filters, opens a
run with its curve, log and attempts, cancels and resumes. ? shows the keys. It needs no mouse, and works over ssh.

Needs textual: pip install 'hpctrain[top]'. `python -m hpctrain status --watch` needs nothing.

Exit code 0; 2 without textual or a terminal, or if FOLDER doesn't exist.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hpctrain.cli.arguments import add_runs_dir, command_parser
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.terminal import can_redraw, unguarded

INSTEAD = "`python -m hpctrain status --watch` needs neither textual nor a terminal"


def main(arguments: list[str]) -> int:
    """Watch runs; ``arguments`` are those after `top`.

    Raises:
        RunDirectoryError: the folder doesn't exist.
    """
    parser = command_parser("top", __doc__)
    meaning = "a folder with runs, such as a sweep's, or its name in --runs-dir"
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help=meaning)
    add_runs_dir(parser)
    options = parser.parse_args(arguments)
    runs_dir = Path(options.runs_dir)
    root = runs_dir if options.folder is None else _folder(options.folder, runs_dir)
    if importlib.util.find_spec("textual") is None:
        parser.error(f"top needs textual: pip install 'hpctrain[top]'; {INSTEAD}")
    if not (sys.stdin.isatty() and can_redraw(sys.stdout)):
        parser.error(f"top needs a terminal that it can draw on; {INSTEAD}")
    from hpctrain.top.app import TopApp
    from hpctrain.top.watch import Watch

    # its control characters are its own; texts of runs are escaped where they are shown
    sys.stdout = unguarded(sys.stdout)
    sys.stderr = unguarded(sys.stderr)
    TopApp(Watch(root)).run()
    return ExitCode.FINISHED


def _folder(name: str, runs_dir: Path) -> Path:
    for path in (Path(name), runs_dir / name):
        if path.is_dir():
            return path
    raise RunDirectoryError(f"{name}: no such folder, here or under {runs_dir}/")
