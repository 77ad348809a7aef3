"""From typing `resume` to the first new step: how long, and what it goes for.

    python tests/benchmarks/restart.py [--worlds 1 2 4] [--rounds 5] [--width 0]

For every world size a run is trained and saved, and then resumed, one step further each time, on this machine. Times
are medians in seconds. `launcher` is what passes before rank zero's process begins; the others are rank zero's own, as
the ledger has them. `torch` is what a bare `import torch` takes here, in a process of its own, between the rounds; with
more ranks than cores nothing is as fast as that. `--width 3000` makes it a perceptron with a checkpoint of 0.5 GB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.times import STARTING

COLUMNS = ("launcher_s", *STARTING, "total_s", "torch_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=0, help="of a perceptron; 0: the network of digits")
    options = parser.parse_args()
    model = ["model=mlp", "model.num_layers=5", f"model.width={options.width}"] if options.width else []
    print("ranks", *(f"{name.removesuffix('_s').replace('_', ' '):>11}" for name in COLUMNS))
    for world_size in options.worlds:
        with tempfile.TemporaryDirectory() as folder:
            rounds = measure(Path(folder), world_size, options.rounds, model)
        print(f"{world_size:<5}", *(f"{statistics.median(one[name] for one in rounds):11.2f}" for name in COLUMNS))


def measure(folder: Path, world_size: int, rounds: int, model: list[str]) -> list[dict[str, float]]:
    """One record per round, by column; the first one, which fills the caches, doesn't count."""
    directory = RunDirectory.at(folder / "run")
    call(folder, f"run_dir={directory.path}", f"cluster.processes_per_node={world_size}", "trainer.max_steps=2", *model)
    found = []
    for turn in range(rounds + 1):
        typed = time.time()
        call(folder, "resume", str(directory.path), f"trainer.max_steps={3 + turn}")
        attempt = Ledger(directory).attempts()[-1]
        record = {name: getattr(attempt, name) or 0.0 for name in STARTING} | {"launcher_s": attempt.launched - typed}
        found.append(record | {"total_s": sum(record.values()), "torch_s": import_torch()})
    return found[1:]


def call(folder: Path, *words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "hpctrain", *words], cwd=folder, env=environ(), capture_output=True, check=True
    )


def import_torch() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=environ(), check=True)
    return time.perf_counter() - began


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


if __name__ == "__main__":
    main()
