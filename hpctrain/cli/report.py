"""Write a page with the curves, attempts, times and results of a run, or of the runs of a sweep.

examples:
  python -m hpctrain report runs/digits/2026-01-31_12-00-00   # writes report.html into the run's folder
  python -m hpctrain report lr                                # the sweep in runs/lr: writes runs/lr/report.html
  python -m hpctrain report lr -o lr.html

The page refers to nothing outside of it: it can be sent, kept and printed. It is made from the run directories, also
while runs are training; SLURM is asked about their jobs where it answers. It doesn't contain the values of cluster.env.

Exit code 0; 2 if RUN is not a run or a folder of runs, or FILE can't be written.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpctrain.cli.arguments import add_runs_dir, command_parser
from hpctrain.errors import ExitCode, RunDirectoryError
from hpctrain.files import write_atomic
from hpctrain.phrases import byte_size
from hpctrain.run.directory import RunDirectory
from hpctrain.status.runs import runs_of

FILE_NAME = "report.html"
"""The help above says it, too."""


def main(arguments: list[str]) -> int:
    """Write a report; ``arguments`` are those after `report`."""
    parser = command_parser("report", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run directory, the folder of a sweep, or a name in runs/")
    meaning = f"the file to write (default: {FILE_NAME} in the folder of RUN)"
    parser.add_argument("-o", dest="output", metavar="FILE", help=meaning)
    add_runs_dir(parser)
    options = parser.parse_args(arguments)
    runs = runs_of(options.run, Path(options.runs_dir))
    folders = (RunDirectory.at(options.run).path, RunDirectory.at(Path(options.runs_dir) / options.run).path)
    home = next(folder for folder in folders if runs[0].path.is_relative_to(folder))
    if len(runs) > 1 or (home != runs[0].path and (home / "sweep.json").is_file()):
        from hpctrain.report.sweep_page import sweep_page

        text = sweep_page(home, runs)
    else:
        from hpctrain.report.run_page import run_page

        home = runs[0].path
        text = run_page(runs[0])
    file = home / FILE_NAME if options.output is None else Path(options.output)
    _write(file, text, None if options.output is not None else RunDirectory(home))
    print(f"wrote {os.path.relpath(file)} ({byte_size(len(text.encode()))})")
    return ExitCode.FINISHED


def _write(file: Path, text: str, directory: RunDirectory | None) -> None:
    """Write the page, with the permissions of a run's or sweep's directory if it goes there."""
    try:
        with directory.permissions() if directory is not None else contextlib.nullcontext():
            write_atomic(file, text, durable=False)
    except OSError as error:
        problem = f"{file}: can't be written ({error.strerror}); name another file with -o FILE"
        raise RunDirectoryError(problem) from error
