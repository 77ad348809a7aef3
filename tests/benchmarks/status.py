"""How long `status --all` takes over many runs, as text and as JSON, from the start of Python to the last line.

    python tests/benchmarks/status.py [--runs 1000] [--rounds 7] [--profile]

Makes the runs of a sweep, finished, running and queued, with a squeue that answers at once. Times are medians of the
whole process's wall time and CPU time; the first round, which fills the caches, doesn't count. The goal is 1 s for
1,000 runs, with one squeue. --profile prints where the time goes instead.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import os
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.many_runs import ManyRuns

GOAL_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = ManyRuns(Path(folder), options.runs)
        words = ["status", "--all", "--runs-dir", folder]
        if options.profile:
            profile(made, words)
            return
        for name, more in (("table", []), ("JSON", ["--json"])):
            measure(made, name, [sys.executable, "-m", "hpctrain", *words, *more], options.rounds)


def measure(made: ManyRuns, name: str, command: list[str], rounds: int) -> None:
    environ = {**made.environ(), "PYTHONPATH": str(Path(__file__).parents[2])}
    # as for users, whose installation is compiled
    environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(made.folder / "bytecode")}
    walls, cpus = [], []
    for turn in range(rounds + 1):
        calls, used, began = len(made.calls()), cpu_s(), time.perf_counter()
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        if turn:
            walls.append(time.perf_counter() - began)
            cpus.append(cpu_s() - used)
        assert done.stdout.count("/sweep/" if name == "JSON" else "sweep/") >= len(made.runs), done.stdout[:1000]
        asked = len(made.calls()) - calls
    print(
        f"{name:<6} {len(made.runs)} runs: {statistics.median(walls):.2f} s [{min(walls):.2f} to {max(walls):.2f}], "
        f"CPU {statistics.median(cpus):.2f} s, squeue {asked}  (goal: {GOAL_S:g} s)"
    )


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def profile(made: ManyRuns, words: list[str]) -> None:
    from hpctrain.cli import main as run

    os.environ |= made.environ()
    with contextlib.redirect_stdout(io.StringIO()):
        run(words)
        profiler = cProfile.Profile()
        profiler.runcall(run, words)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()
