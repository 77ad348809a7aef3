"""ResNet-50 and GPT-2 (124M) in bf16 on one GPU: hpctrain beside the loop that a person writes.

    python tests/benchmarks/gpu.py [--models resnet50 gpt2] [--compiled no yes] [--rounds 3] [--steps 100]
    python tests/benchmarks/gpu.py --device cpu --tiny --rounds 1     # tries the program itself, with toys

Every contender trains the same model on the same samples with the same fused optimizer, in a process of its own, one
after another, in an order that turns with the rounds. `by hand` takes part twice: how far the second is from the first
is this machine's noise. hpctrain runs with its defaults, so it also logs, measures, and checks each save.

Times are medians over rounds with the span in brackets. A step is read over blocks between two saves, without the first
block. `first step` is from the process's start; with the compiler it includes compiling, since the compiler's cache is
empty in each process. `peak` is what torch allocated on the GPU; on a CPU, the resident memory. A save by hand is
torch.save, without fsync; that of hpctrain is the time for which training waits, while the rest is written in the
background, which isn't part of a step here either. hpctrain's first save may also wait for page-locked memory. `x` is
the median of each round's ratio to `by hand`. MFU is of the GPU's dense peak in bf16, `-` if that isn't known.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.append(str(HERE / "contenders"))

from gpu_workload import KINDS, Kind, kind_of  # noqa: E402 - beside the contenders
from torch.nn.functional import cross_entropy  # noqa: E402 - as above
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402 - as above

from hpctrain.train.profiling.flops import peak_flops  # noqa: E402 - as above

CONTENDERS = {"by hand": "gpu_by_hand", "by hand, again": "gpu_by_hand", "hpctrain": "gpu_with_hpctrain"}
YARDSTICK = "by hand"
BLOCKS = 4
"""Saves follow all but the last one."""
Record = dict[str, float]


def main() -> None:
    options = arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA on this machine: run it on one with a GPU, or try it with --device cpu --tiny")
    if options.steps % BLOCKS or options.steps < 3 * BLOCKS:
        raise SystemExit(f"--steps={options.steps}: expected a multiple of {BLOCKS}, at least {3 * BLOCKS}")
    print(f"torch {torch.__version__}", flush=True)
    names = list(CONTENDERS)
    for model in options.models:
        for compiled in options.compiled:
            rounds = []
            for turn in range(options.rounds):
                order = names[turn % len(names) :] + names[: turn % len(names)]
                rounds.append({name: measure(name, model, compiled == "yes", options) for name in order})
            print_table(model, compiled == "yes", rounds, options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--compiled", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
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
            "PYTHONPATH": str(HERE.parents[1]),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "compiled"),
        }
        if options.device == "cuda":
            environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        command = [sys.executable, str(HERE / "contenders" / f"{CONTENDERS[name]}.py")]
        done = subprocess.run(command, env=environ, cwd=folder, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SystemExit(f"{name} with {model} ended with {done.returncode}")
        return json.loads(report.read_text())


def flops_per_step(kind: Kind) -> float:
    """FLOPs of a forward and backward pass over a batch, as `torch.utils.flop_counter` counts them."""
    with torch.device("meta"), FlopCounterMode(display=False) as count:
        model = kind.model()
        if len(kind.sample) == 1:
            given = torch.zeros(2, *kind.sample, dtype=torch.int64)
            labels = given
        else:
            given, labels = torch.zeros(2, *kind.sample), torch.zeros(2, dtype=torch.int64)
        cross_entropy(model(given).flatten(0, -2), labels.flatten()).backward()
    return count.get_total_flops() / 2 * kind.batch_size


def print_table(model: str, compiled: bool, rounds: list[dict[str, Record]], options: argparse.Namespace) -> None:
    device = str(rounds[0][YARDSTICK]["device"])
    kind = kind_of(model, tiny=options.tiny)
    flops, peak = flops_per_step(kind), peak_flops(device, "bf16")
    print(
        f"\n{model}{' (a toy)' if options.tiny else ''} in bf16, {'compiled' if compiled else 'not compiled'}, "
        f"{kind.batch_size} samples and {flops / 1e12:.3g} TFLOP a step, {options.steps} steps, {len(rounds)} rounds, "
        f"on {device}"
    )
    print(
        f"{'':<16}{'ms a step':>26}{'x':>7}{'first step, s':>22}{'x':>6}{'peak, GB':>10}{'x':>6}"
        f"{'first save, s':>15}{'later saves, s':>24}{'x':>6}{'MFU':>7}"
    )
    for name in CONTENDERS:
        mine = [one[name] for one in rounds]

        def ratio(key: str, mine: list[Record] = mine) -> str:
            return f"{statistics.median(a[key] / b[YARDSTICK][key] for a, b in zip(mine, rounds, strict=True)):.2f}"

        step_s = statistics.median(one["step_ms"] for one in mine) / 1e3
        mfu = "-" if peak is None else f"{flops / step_s / peak:.1%}"
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
