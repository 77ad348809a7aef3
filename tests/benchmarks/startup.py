"""How long a submission takes beside a bare program that imports Hydra and submitit for the same result.

    python tests/benchmarks/startup.py [--rounds 30]

Both compose the same configuration and print an sbatch script; each round starts both processes, in changing order.
Times are medians of the whole process's wall time, with the quartiles in brackets. The ratio is the median of the
rounds' ratios, and so is the noise: the bare program beside itself. The goal is a ratio of 1.3 at most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.paths import conf_dir

GOAL = 1.3
BARE = """\
import sys

import hydra
import submitit
from submitit.slurm.slurm import _make_sbatch_string

from hpctrain.config.root import register

register()
with hydra.initialize_config_dir(sys.argv[1], version_base="1.3"):
    config = hydra.compose("train", ["cluster=slurm", "cluster.dry_run=true"])
print(
    _make_sbatch_string(
        command=f"python -m submitit.core._submit {submitit.__version__}",
        folder="logs",
        job_name=config.task._target_,
        nodes=config.nodes,
        time=config.cluster.time_limit_min,
        use_srun=False,
    )
)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bare.py"
        program.write_text(BARE)
        bare = [sys.executable, str(program), str(conf_dir())]
        ours = [sys.executable, "-m", "hpctrain", "cluster=slurm", "cluster.dry_run=true"]
        table = measure({"hpctrain": ours, "bare": bare, "bare again": bare}, rounds, Path(folder))
    for name, times in table.items():
        low, _, high = statistics.quantiles(times)
        print(f"{name:<12} {1e3 * statistics.median(times):6.0f} ms  [{1e3 * low:.0f} to {1e3 * high:.0f}]")
    ratio, noise = (paired(table[name], table["bare"]) for name in ("hpctrain", "bare again"))
    print(f"ratio        {ratio:.2f}  (goal: {GOAL} at most; noise: {noise:.2f})")


def measure(commands: dict[str, Sequence[str]], rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each command in each round; the first round, which fills the caches, doesn't count."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    times: dict[str, list[float]] = {name: [] for name in commands}
    names = list(commands)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            done = subprocess.run(commands[name], cwd=folder, env=environ, capture_output=True, text=True, check=True)
            seconds = time.perf_counter() - began
            assert "#SBATCH --time=60" in done.stdout, done.stdout
            if turn:
                times[name].append(seconds)
    return times


def paired(times: Sequence[float], yardstick: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, yardstick, strict=True))


if __name__ == "__main__":
    main()
