"""What it costs a run to keep its best checkpoint: the same run with checkpoint.keep_best=0 and 1, in turn.

    python tests/benchmarks/best_saves.py [--rounds 5] [KEY=VALUE ...]

Each run is a process of its own: the digits for 10 epochs, unless the keys say otherwise. With
`trainer.eval_every_steps=5`, evaluations are frequent. Shown are the CPU seconds of the process, and the wall-clock
seconds for which training waited for saves, as medians over rounds with the span in brackets; the bytes of the
checkpoints at the end; the median ratio of the CPU seconds of the two runs of a round; and the extra saves. On a
machine that does other things as well, go by the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def run(folder: Path, *words: str) -> dict[str, float]:
    begin = cpu_s()
    subprocess.run([sys.executable, "-m", "hpctrain", *words, f"run_dir={folder}"], check=True, capture_output=True)
    end = json.loads((folder / "attempts.jsonl").read_text().splitlines()[-1])
    size = sum(file.stat().st_size for file in folder.glob("checkpoints/*/*"))
    return {"cpu": cpu_s() - begin, "saving": end["save_s"], "bytes": size}


def num_best(folder: Path) -> int:
    """The evaluations that were the best so far."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    values = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
    return sum(value > max(values[:number], default=-1.0) for number, value in enumerate(values))


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} s [{min(values):.3f} .. {max(values):.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options, words = parser.parse_known_args()
    found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.rounds):
            for keep in (0, 1) if number % 2 else (1, 0):
                folder = Path(name) / f"{keep}_{number}"
                found[keep].append(run(folder, *words, f"checkpoint.keep_best={keep}"))
        extra = num_best(Path(name) / "1_0")
    for keep, runs in found.items():
        cpu, saving = ([each[key] for each in runs] for key in ("cpu", "saving"))
        print(f"keep_best={keep}  CPU {shown(cpu)}, saving {shown(saving)}, {runs[0]['bytes']:.0f} bytes")
    ratios = [one["cpu"] / none["cpu"] for none, one in zip(found[0], found[1], strict=True)]
    print(f"ratio {statistics.median(ratios):.3f} [{min(ratios):.3f} .. {max(ratios):.3f}], {extra} saves of the best")


if __name__ == "__main__":
    main()
