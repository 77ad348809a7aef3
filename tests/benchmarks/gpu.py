"""ResNet-50 and GPT-2 (124M) in bf16 on one GPU: hpctrain, Lightning and Accelerate beside a loop written by hand.

    python tests/benchmarks/gpu.py [--models gpt2 resnet50] [--compiled no yes] [--rounds 2] [--steps 60]
    python tests/benchmarks/gpu.py --device cpu --tiny --rounds 1     # tries the program itself, with toys

Every contender trains the same model on the same samples with the same fused optimizer, in a process of its own, one
after another, in an order that turns with the rounds. `by hand` takes part twice: how far the second is from the first
is this machine's noise. hpctrain runs with its defaults, so it also logs, measures, and checks each save. Lightning
logs as often, and takes part if it is installed; so does Accelerate.

Times are medians over rounds with the span in brackets. A step is read over blocks between two saves, without the first
block. `first step` is from the process's start. An unmeasured process fills the compiler's cache first, and all share
it. `peak` is what torch allocated on the GPU; on a CPU, the resident memory. A save by hand is torch.save,
without fsync; that of hpctrain is the time for which training waits, while the rest is written in the background, which
isn't part of a step here either. hpctrain's first save may also wait for page-locked memory. `x` is the median of each
round's ratio to `by hand`. MFU is of the GPU's dense peak in bf16, `-` if that isn't known.
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
from typing import Any

import torch

from tests.benchmarks.contenders.gpu_workload import KINDS

HERE = Path(__file__).parent

CONTENDERS = {
    "by hand": "gpu_by_hand",
    "by hand, again": "gpu_by_hand",
    "hpctrain": "gpu_with_hpctrain",
    "Lightning": "gpu_with_lightning",
    "Accelerate": "gpu_with_accelerate",
}
PACKAGES = {"Lightning": "lightning", "Accelerate": "accelerate"}
YARDSTICK = "by hand"
BLOCKS = 4
"""Saves follow all but the last one."""
Record = dict[str, Any]


def main() -> None:
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA on this machine: run it on one with a GPU, or try it with --device cpu --tiny")
    if options.steps % BLOCKS or options.steps < 3 * BLOCKS:
        raise SystemExit(f"--steps={options.steps}: expected a multiple of {BLOCKS}, at least {3 * BLOCKS}")
    print(f"torch {torch.__version__}", flush=True)
    names = [name for name in CONTENDERS if importlib.util.find_spec(PACKAGES.get(name, "torch"))]
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        for model in options.models:
            for compiled in options.compiled:
                if compiled == "yes":
                    measure("by hand", model, True, options)
                rounds = []
                for turn in range(options.rounds):
                    order = names[turn % len(names) :] + names[: turn % len(names)]
                    rounds.append({name: measure(name, model, compiled == "yes", options) for name in order})
                print_table(model, compiled == "yes", rounds, options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50"], choices=list(KINDS))
    parser.add_argument("--compiled", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="toys in place of the models")
    parser.add_argument("--overrides", default="", help="for hpctrain, separated by spaces")
    parser.add_argument("--folder", type=Path, help="for saves, on the file system to measure")
    return parser.parse_args()


def measure(name: str, model: str, compiled: bool, options: argparse.Namespace) -> Record:
    """One training of a contender, to its end."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = Path(folder) / "report.json"
        environ = {
            **os.environ,
            "MODEL": model,
            "TINY": str(int(options.tiny)),
            "COMPILED": str(int(compiled)),
            "DEVICE": options.device,
            "STEPS": str(options.steps),
            "BLOCK": str(options.steps // BLOCKS),
            "REPORT": str(report),
            "OVERRIDES": options.overrides,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")])),
        }
        if options.device == "cuda":
            environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        command = [sys.executable, str(HERE / "contenders" / f"{CONTENDERS[name]}.py")]
        done = subprocess.run(command, env=environ, cwd=folder, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SystemExit(f"{name} with {model} ended with {done.returncode}")
        return json.loads(report.read_text())


def print_table(model: str, compiled: bool, rounds: list[dict[str, Record]], options: argparse.Namespace) -> None:
    device = str(rounds[0][YARDSTICK]["device"])
    flops = rounds[0][YARDSTICK]["flops"]
    print(
        f"\n{model}{' (a toy)' if options.tiny else ''} in bf16, {'compiled' if compiled else 'not compiled'}, "
        f"{flops / 1e12:.3g} TFLOP a step, {options.steps} steps, {len(rounds)} rounds, "
        f"on {device}"
    )
    print(
        f"{'':<16}{'ms a step':>26}{'x':>7}{'first step, s':>22}{'x':>6}{'peak, GB':>10}{'x':>6}"
        f"{'first save, s':>15}{'later saves, s':>24}{'x':>6}{'MFU':>7}"
    )
    for name in rounds[0]:
        mine = [one[name] for one in rounds]

        def ratio(key: str, mine: list[Record] = mine) -> str:
            return f"{statistics.median(a[key] / b[YARDSTICK][key] for a, b in zip(mine, rounds, strict=True)):.2f}"

        shares = [one["mfu"] for one in mine if one["mfu"] is not None]
        mfu = f"{statistics.median(shares):.1%}" if shares else "-"
        print(
            f"{name:<16}{spread(mine, 'step_ms', 2):>26}{ratio('step_ms'):>7}{spread(mine, 'first_step_s', 1):>22}"
            f"{ratio('first_step_s'):>6}{statistics.median(one['peak_gb'] for one in mine):>10.2f}{ratio('peak_gb'):>6}"
            f"{statistics.median(one['first_save_s'] for one in mine):>15.3f}{spread(mine, 'save_s', 3):>24}"
            f"{ratio('save_s'):>6}{mfu:>7}",
            flush=True,
        )


def spread(records: list[Record], key: str, digits: int) -> str:
    values = [one[key] for one in records]
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}..{max(values):.{digits}f}]"


if __name__ == "__main__":
    main()
