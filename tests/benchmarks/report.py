"""What a report costs: seconds and bytes, for a run with many records and for a sweep of many runs.

    python tests/benchmarks/report.py [--records 100000] [--runs 500] [--rounds 5]

The run has as many records, with seven metrics each, and twenty attempts. Each run of the sweep has two attempts and
200 records, with an evaluation in every tenth; two keys and the seed vary. Both are written into the temporary folder
first. A round starts the whole command, as a user does. Shown are medians over rounds, with the span in brackets, and
the size of the page. The pages of the files are in memory: a cold disk takes longer.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpctrain.files import write_json
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import EvaluationRecord, Score
from hpctrain.run.ledger import Ledger, StartFacts
from hpctrain.run.reason import Reason

BEGIN = 1_795_000_000.0
SPENT = {"import_s": 2.0, "first_step_s": 1.0, "train_s": 800.0, "eval_s": 50.0, "save_s": 5.0}


class Clock:
    """Epoch seconds that the caller sets."""

    now = BEGIN

    def __call__(self) -> float:
        return self.now


def config_text() -> str:
    """The configuration of a run of the digits."""
    words = [sys.executable, "-m", "hpctrain", "--cfg", "job"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def make_run(path: Path, records: int, attempts: int, config: str, varied: dict[str, str]) -> RunDirectory:
    """Write a run whose attempts share the records evenly."""
    directory = RunDirectory.at(path)
    directory.create(0o750)
    directory.config.write_text(config)
    write_json(directory.manifest, {"command": "python -m hpctrain", "varied": varied, "time": BEGIN}, durable=False)
    draw = random.Random(str(path.name)).random
    lines = []
    for number in range(records):
        step, when = 10 * (number + 1), BEGIN + number
        loss = 2.0 / (1 + step / 1000) + 0.1 * draw()
        record = {"step": step, "time": when, "train/loss": loss, "train/lr": 1e-3, "train/epoch": step / 500}
        record |= {"train/grad_norm": draw(), "throughput/samples_per_s": 5000 * draw(), "memory/peak_gb": 0.3}
        lines.append(json.dumps(record | {"throughput/waiting_for_data": draw()}))
        if number % 10 == 9:
            lines.append(json.dumps({"step": step, "time": when, "eval/accuracy": 1 - loss / 4, "eval/loss": loss}))
    directory.metrics.write_text("\n".join(lines) + "\n")
    clock = Clock()
    ledger = Ledger(directory, clock=clock)
    for attempt in range(attempts):
        number = ledger.claim()
        first, last = (10 * (records * place // attempts) for place in (attempt, attempt + 1))
        clock.now = BEGIN + first / 10 - 0.5
        ledger.start(
            number, StartFacts(launched=clock.now - 3), job_id=None, nodes=["n1", "n2"], world_size=2, step=first
        )
        clock.now = BEGIN + last / 10 - 1
        reason = Reason.COMPLETED if attempt == attempts - 1 else Reason.PREEMPTED
        write_json(ledger.directory.attempt(number) / "times.json", SPENT)
        ledger.end(number, reason=reason, step=last)
    best = Score("accuracy", "max", 1 - draw() / 10)
    means = {"eval/accuracy": best.value, "eval/loss": 0.5}
    EvaluationRecord(step=10 * records, means=means, best=best, best_step=10 * records).write(
        directory.attempt(attempts)
    )
    return directory


def make_sweep(home: Path, runs: int) -> Path:
    """Write a sweep."""
    config = config_text()
    draw = random.Random(0).random
    for number in range(runs):
        rate, decay, seed = 10 ** (-5 + 4 * draw()), draw(), number % 3
        varied = {"optimizer.lr": f"{rate:.3g}", "optimizer.weight_decay": f"{decay:.3g}", "seed": str(seed)}
        own = config.replace("\n  lr: 0.003\n", f"\n  lr: {rate:.3g}\n").replace("\nseed: 0\n", f"\nseed: {seed}\n")
        assert own != config
        make_run(
            home / str(number), 200, 2, own.replace("  weight_decay: 0.01\n", f"  weight_decay: {decay:.3g}\n"), varied
        )
    return home


def measure(run: Path, rounds: int) -> str:
    """Time the command; return seconds and size."""
    page = run.parent / "page.html"
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "hpctrain", "report", str(run), "-o", str(page)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        took.append(time.perf_counter() - begin)
    size = math.ceil(page.stat().st_size / 1000)
    return f"{statistics.median(took):.2f} s [{min(took):.2f} .. {max(took):.2f}], {size} kB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = make_run(Path(name) / "run", options.records, 20, config_text(), {}).path
        print(f"a run with {options.records:,} records   {measure(run, options.rounds)}", flush=True)
        sweep = make_sweep(Path(name) / "sweep", options.runs)
        print(f"a sweep of {options.runs:,} runs           {measure(sweep, options.rounds)}")


if __name__ == "__main__":
    main()
