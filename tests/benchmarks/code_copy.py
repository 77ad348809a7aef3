"""What the copy of the code costs a launch: seconds to make it and to check it, for a repository of so many files.

    python tests/benchmarks/code_copy.py [--files 1000] [--rounds 15]

The repository is a new one in the temporary folder, in folders of 50 files of 1 to 8 KB, all of them tracked by git.
Each round copies it into another run, as a launch does, and checks the copy, as each attempt does. Shown are medians
over rounds, with the span in brackets. The pages of the files are in memory: a cold disk takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from hpctrain.config.code import Code
from hpctrain.launch.launch_code import copy_code
from hpctrain.run.directory import RunDirectory

MODE = 0o750


def make_repository(folder: Path, files: int) -> None:
    for number in range(files):
        path = folder / f"package_{number // 50}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}\n" * (100 + number % 700))
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


def shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s [{min(seconds):.3f} .. {max(seconds):.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    copies, checks = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_repository(folder / "repository", options.files)
        for number in range(options.rounds):
            run = RunDirectory.at(folder / f"run_{number}")
            run.create(MODE)
            begin = time.perf_counter()
            copy = copy_code(folder / "repository", Code(), run, MODE, own_folders=None, warn=print)
            copied = time.perf_counter()
            assert copy is not None
            assert copy.files == options.files
            assert not copy.find_damage()
            copies.append(copied - begin)
            checks.append(time.perf_counter() - copied)
    print(f"copying {options.files} files   {shown(copies)}")
    print(f"checking the copy     {shown(checks)}")


if __name__ == "__main__":
    main()
