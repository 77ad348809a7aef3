"""How many instructions a step takes in hpctrain, and in a loop by hand: a figure that a busy machine doesn't change.

    python tests/benchmarks/instructions.py [--workload mlp] [--trees OTHER ...]

valgrind's callgrind (Debian's package valgrind) counts the instructions of a training of 200 steps and of one of 1200;
a step's are the difference over 1000. One thread, one process. `--trees` measures hpctrain in other checkouts as well,
such as one of an earlier commit (`git worktree add`). Takes about eight minutes, and half as long for each more. Two
counts of one checkout differed by up to 0.3%: smaller differences say nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
STEPS = (200, 1200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="mlp", choices=["mlp", "convnet"])
    parser.add_argument("--trees", nargs="*", default=[], type=Path, help="checkouts with another hpctrain")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind isn't installed: on Debian or Ubuntu, apt-get install valgrind")
    trees = [HERE.parents[1], *options.trees]
    contenders = [("by hand", "by_hand", trees[0]), *((f"hpctrain, {tree}", "with_hpctrain", tree) for tree in trees)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = {
            name: [threads.submit(count, program, tree, options.workload, steps) for steps in STEPS]
            for name, program, tree in contenders
        }
    by_hand = 0.0
    for name, (few, many) in found.items():
        each = (many.result() - few.result()) / (STEPS[1] - STEPS[0])
        by_hand = by_hand or each
        print(f"{each:>12,.0f} instructions a step {100 * (each / by_hand - 1):>+7.2f} %  {name}")


def count(program: str, tree: Path, workload: str, steps: int) -> int:
    """The instructions of a whole training."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **os.environ,
            "WORKLOAD": workload,
            "STEPS": str(steps),
            "REPORT": f"{folder}/report.json",
            "PYTHONPATH": str(tree.resolve()),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/callgrind.out"]
        program = str(HERE / "contenders" / f"{program}.py")
        done = subprocess.run(
            [*valgrind, sys.executable, program], env=environ, cwd=folder, capture_output=True, text=True, check=False
        )
    total = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or total is None:
        raise SystemExit(f"{program} ended with {done.returncode}: {done.stderr[-2000:]}")
    return int(total[1])


if __name__ == "__main__":
    main()
