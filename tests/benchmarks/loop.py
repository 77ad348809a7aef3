"""What a step costs in hpctrain, and how soon the first one is done: beside a loop by hand, and beside its peers.

    python tests/benchmarks/loop.py [--workloads mlp convnet convnet:2] [--rounds 7] [--contenders ...]

Every contender trains the same model on the same samples, in a process of its own, one after another, in an order that
turns with the rounds. `by hand` takes part twice: how far the second is from the first is this machine's noise.
hpctrain runs with its defaults, so it writes metrics every ten steps to a file, to TensorBoard and to the console, it
agrees on stops and it saves at the end; the loop by hand, Fabric and Accelerate do none of that, and Lightning is
measured with all of it off and with its logging on. `convnet:2` means two gloo processes.

Times are medians over rounds with the span in brackets; `over` is the median of each round's difference to the loop by
hand of the same round; `CPU` is the time of all threads per step; `first step` is from the process's start; `peak` is
the largest resident size. OMP_NUM_THREADS is the cores over the processes, or what --threads says. Peers that aren't
installed are left out (pip install 'lightning!=2.6.2,!=2.6.3' accelerate: these two releases were malicious).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hpctrain.launch.local import free_port, rank_variables

HERE = Path(__file__).parent
CONTENDERS = {
    "by hand": ("by_hand", {}),
    "by hand, again": ("by_hand", {}),
    "hpctrain": ("with_hpctrain", {}),
    "Fabric": ("with_fabric", {}),
    "Accelerate": ("with_accelerate", {}),
    "Lightning, all off": ("with_lightning", {}),
    "Lightning, logging": ("with_lightning", {"LOGGING": "1"}),
}
NEEDS = {"with_fabric": "lightning", "with_lightning": "lightning", "with_accelerate": "accelerate"}
LIKE_TORCHRUN = {"TORCHELASTIC_RUN_ID": "loop"}
"""By which Lightning knows that its ranks were started for it."""
STEPS = {"mlp": 4000, "convnet": 300}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["mlp", "convnet", "convnet:2"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--threads", type=int, help="per process")
    parser.add_argument("--overrides", default="", help="for hpctrain, separated by spaces")
    options = parser.parse_args()
    chosen = [name for name in CONTENDERS if name in {*options.contenders, "by hand"} and is_installed(name)]
    for workload in options.workloads:
        rounds = []
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(options.rounds):
                order = chosen[turn % len(chosen) :] + chosen[: turn % len(chosen)]
                rounds.append({name: measure(name, workload, Path(folder), options) for name in order})
        print_table(workload, chosen, rounds)


def is_installed(name: str) -> bool:
    needed = NEEDS.get(CONTENDERS[name][0])
    return needed is None or importlib.util.find_spec(needed) is not None


def measure(name: str, workload: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """One training of a contender, to its end."""
    program, variables = CONTENDERS[name]
    kind, _, processes = workload.partition(":")
    world_size = int(processes or 1)
    report = Path(tempfile.mkdtemp(dir=folder)) / "report.json"
    environ = {
        **os.environ,
        **variables,
        "WORKLOAD": kind,
        "STEPS": str(STEPS[kind]),
        "REPORT": str(report),
        "OVERRIDES": options.overrides,
        "OMP_NUM_THREADS": str(options.threads or max(len(os.sched_getaffinity(0)) // world_size, 1)),
        "PYTHONPATH": str(HERE.parents[1]),
    }
    port = free_port()
    ranks = (
        [rank_variables(rank, world_size, port) | LIKE_TORCHRUN for rank in range(world_size)]
        if world_size > 1
        else [{}]
    )
    command = [sys.executable, str(HERE / "contenders" / f"{program}.py")]
    started = [
        subprocess.Popen(command, env={**environ, **rank}, cwd=report.parent, stdout=subprocess.DEVNULL)
        for rank in ranks
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{name} with {workload} ended with {codes}")
    return json.loads(report.read_text())


def print_table(workload: str, names: list[str], rounds: list[dict[str, dict[str, float]]]) -> None:
    print(f"\n{workload}, {STEPS[workload.partition(':')[0]]} steps, {len(rounds)} rounds")
    print(
        f"{'':<20}{'us a step':>26}{'over, us':>12}{'over, %':>10}{'CPU, us':>10}{'first step, s':>22}{'peak, MB':>10}"
    )
    for name in names:
        steps, firsts = ([one[name][key] for one in rounds] for key in ("step_us", "first_step_s"))
        over = statistics.median(one[name]["step_us"] - one["by hand"]["step_us"] for one in rounds)
        ratio = statistics.median(one[name]["step_us"] / one["by hand"]["step_us"] for one in rounds)
        peak = statistics.median(one[name]["peak_mb"] for one in rounds)
        cpu = statistics.median(one[name]["cpu_us"] for one in rounds)
        costs = f"{over:>12.1f}{(ratio - 1) * 100:>10.1f}{cpu:>10.1f}"
        print(f"{name:<20}{spread(steps, 1):>26}{costs}{spread(firsts, 2):>22}{peak:>10.0f}", flush=True)


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"


if __name__ == "__main__":
    main()
