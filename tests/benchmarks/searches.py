"""What stopping bad runs early saves: optimizer steps of sweep=asha and of sweep=random to the same loss.

    python tests/benchmarks/searches.py [--seeds 5] [--runs 27] [--steps 270] [--min-steps 10] [--factor 3]
        [--parallel 2] [--folder FOLDER]

A tiny GPT learns the bytes of task=text. The space is fixed, and was written down before the first run: the learning
rate, log-uniform in [1e-5, 1e-1); weight decay, log-uniform in [1e-3, 1); warm-up, 1 to 27 steps. Searches with the
same seed draw the same values for run k, and run k trains the same whether it pauses or not. The benchmark checks that:
each loss that both searches recorded for run k at a step has to be the same to the last bit, or it ends with an error.

So asha trains a part of what random trains, and its answer, the lowest final eval/loss of its completed runs, can be as
good as random's or worse, never better. Three questions, each answered for every seed:

- `whole`: all steps of random over all steps of asha, with how far asha's answer is above random's, and its place among
  random's final losses. Random finds the best of its runs by definition; this is the price of that certainty.
- `equal`: steps until a loss as low as asha's answer has been evaluated, random over asha. This is the ratio to quote.
  Both find that loss, because it is the worse of the two answers.
- `best`: the same for random's answer, which asha may miss; then there is no ratio, and it counts as missed.

`places` are those that random's best run would have had among all runs at each rung: what asha can't know. If they are
far back at the first one, it is too early.

The order of random's runs is arbitrary, so its steps are the mean over all orders, and not those of a lucky one: a run
that doesn't reach the loss comes before the first of m that do with probability 1/(m+1). A run that reaches it counts
up to the evaluation that does. Asha's steps are those of the one order that it had, by its journal; the spread over
seeds includes that luck. Evaluations come every `--min-steps`, and cost both searches alike per step; they aren't
counted. Neither are starts, although asha starts a run again at each rung. Wall time has all of that; on a machine that
does other things as well, and with steps this short, it says little.

One small model, one task, one space with one key that decides most: how much asha saves elsewhere depends on how early
runs show how good they are. `--folder` keeps the runs there, and takes those that are there already.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpctrain.run.directory import RunDirectory
from hpctrain.search.journal import JournalEvent, read_journal

SPACE = (
    "optimizer.lr=tag(log,interval(1e-5,1e-1))",
    "optimizer.weight_decay=tag(log,interval(1e-3,1))",
    "schedule.warmup_steps=interval(1,27)",
)
FIXED = (
    "task=text",
    "task.context_length=32",
    "task.held_out=0.02",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.width=32",
    "trainer.global_batch_size=16",
    "logger.tensorboard=false",
    "logger.measure=false",
    "code.snapshot=none",
)
COMPARED = ("eval/loss", "train/loss", "train/grad_norm")
Curve = dict[int, float]
"""Loss by step of the evaluation."""


@dataclass(frozen=True)
class Trained:
    """A stretch of a run that was trained without a pause: the steps after `begin`, up to `end`."""

    run: int
    begin: int
    end: int


@dataclass(frozen=True)
class Outcome:
    """What a search did.

    Attributes:
        curves: of its runs.
        trained: stretches in the order in which they were trained.
        took_s: wall time, start-up included.
    """

    curves: dict[int, Curve]
    trained: list[Trained]
    took_s: float

    def final(self, steps: int) -> list[float]:
        """The losses of runs that were trained to their end, the best first."""
        return sorted(curve[steps] for curve in self.curves.values() if steps in curve)

    def total(self) -> int:
        return sum(one.end - one.begin for one in self.trained)


def steps_in_order(outcome: Outcome, target: float) -> int | None:
    """Steps until a loss as low as the target was evaluated; None if none was."""
    spent = 0
    for one in outcome.trained:
        curve = outcome.curves[one.run]
        reached = [step for step in sorted(curve) if one.begin < step <= one.end and curve[step] <= target]
        if reached:
            return spent + reached[0] - one.begin
        spent += one.end - one.begin
    return None


def steps_in_any_order(outcome: Outcome, target: float) -> float:
    """The same, as the mean over all orders of runs that are trained without a pause."""
    reached, missed = [], []
    for one in outcome.trained:
        hits = [step for step, value in outcome.curves[one.run].items() if value <= target]
        (reached if hits else missed).append(min(hits, default=one.end))
    return sum(missed) / (len(reached) + 1) + statistics.mean(reached)


def places(outcome: Outcome, rungs: Sequence[int], steps: int) -> str:
    """Where the run that is best in the end stands at each rung."""
    curves = outcome.curves
    best = min(curves, key=lambda run: curves[run].get(steps, math.inf))
    ranks = {
        rung: sum(curve[rung] < curves[best][rung] for curve in curves.values() if rung in curve) for rung in rungs
    }
    return ", ".join(f"{rank + 1} at {rung}" for rung, rank in ranks.items())


def records_of(run: Path) -> dict[tuple[str, int], float]:
    """All compared values by name and step."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        found |= {(name, record["step"]): record[name] for name in COMPARED if name in record}
    return found


def curve_of(run: Path) -> Curve:
    losses = ((step, value) for (name, step), value in records_of(run).items() if name == "eval/loss")
    return {step: value if isinstance(value, float) and math.isfinite(value) else math.inf for step, value in losses}


def search(kind: str, seed: int, folder: Path, options: argparse.Namespace) -> Outcome:
    """Make a search with the command that a user would type, and read what it did."""
    home, log = folder / f"{kind}-{seed}", folder / f"{kind}-{seed}.log"
    took = folder / f"{kind}-{seed}.seconds"
    if not took.exists():
        words = [f"sweep={kind}", f"sweep.seed={seed}", f"sweep.num_runs={options.runs}", f"run_dir={home}"]
        if kind == "asha":
            words += [f"sweep.min_steps={options.min_steps}", f"sweep.reduction_factor={options.factor}"]
        words += [f"trainer.max_steps={options.steps}", f"trainer.eval_every_steps={options.min_steps}"]
        # one thread each: two searches side by side would otherwise share the cores badly
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        begin = time.perf_counter()
        with log.open("w") as output:
            command = [sys.executable, "-m", "hpctrain", "-m", *FIXED, *words, *SPACE]
            subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, env=environment)
        took.write_text(str(time.perf_counter() - begin))
    runs = sorted(int(path.name) for path in home.iterdir() if path.name.isdecimal())
    curves = {run: curve_of(home / str(run)) for run in runs}
    outcome = Outcome(curves, trained_in(home, curves), float(took.read_text()))
    print(f"seed {seed}, {kind}: {outcome.total():,} steps, best {outcome.final(options.steps)[0]:.4f}", flush=True)
    return outcome


def trained_in(home: Path, curves: dict[int, Curve]) -> list[Trained]:
    ends = [one for one in read_journal(RunDirectory.at(home)) if one.event is JournalEvent.END]
    if not ends:  # without a journal, the runs were trained one after another
        return [Trained(run, 0, max(curve)) for run, curve in curves.items()]
    at: dict[int, int] = {}
    trained = []
    for end in ends:
        trained.append(Trained(end.run, at.get(end.run, 0), end.step))
        at[end.run] = end.step
    return trained


def compared(folder: Path, seed: int, runs: Sequence[int]) -> int:
    """Check that the runs of both searches are the same where both have a value; return how many values that are."""
    count = 0
    for run in runs:
        alone, paused = (records_of(folder / f"{kind}-{seed}" / str(run)) for kind in ("random", "asha"))
        for key in alone.keys() & paused.keys():
            if repr(alone[key]) != repr(paused[key]):  # a NaN is the same as a NaN
                name, step = key
                raise SystemExit(f"seed {seed}, run {run}, step {step}: {name} is {alone[key]} and {paused[key]}")
            count += 1
    return count


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} x [{min(values):.1f} .. {max(values):.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=27)
    parser.add_argument("--steps", type=int, default=270)
    parser.add_argument("--min-steps", type=int, default=10)
    parser.add_argument("--factor", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.parallel) as pool:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        tasks = [(kind, seed) for seed in range(options.seeds) for kind in ("random", "asha")]
        found = dict(zip(tasks, pool.map(lambda task: search(*task, folder, options), tasks), strict=True))
        same = sum(compared(folder, seed, list(found["asha", seed].curves)) for seed in range(options.seeds))
    print(f"\n{same:,} values that both searches recorded: the same to the last bit")
    whole, equal, best = [], [], []
    powers = (options.min_steps * options.factor**rung for rung in itertools.count())
    rungs = list(itertools.takewhile(lambda step: step < options.steps, powers))
    for seed in range(options.seeds):
        random, asha = found["random", seed], found["asha", seed]
        ranked, answer = random.final(options.steps), asha.final(options.steps)[0]
        whole.append(random.total() / asha.total())
        needed, spent = steps_in_any_order(random, answer), steps_in_order(asha, answer)
        assert spent is not None
        equal.append(needed / spent)
        shown = "missed"
        if (found_best := steps_in_order(asha, ranked[0])) is not None:
            best.append(steps_in_any_order(random, ranked[0]) / found_best)
            shown = f"{best[-1]:.1f} x"
        print(
            f"seed {seed}: whole {random.total():,} / {asha.total():,} = {whole[-1]:.1f} x, "
            f"answers {ranked[0]:.4f} and {answer:.4f} (place {ranked.index(answer) + 1} of {len(ranked)}); "
            f"equal {needed:,.0f} / {spent:,} = {equal[-1]:.1f} x; best {shown}; "
            f"places {places(random, rungs, options.steps)}; wall {random.took_s:.0f} and {asha.took_s:.0f} s"
        )
    print(f"whole  {spread(whole)}")
    print(f"equal  {spread(equal)}")
    print(
        f"best   {f'{spread(best)}, ' if best else ''}missed with {options.seeds - len(best)} of {options.seeds} seeds"
    )


if __name__ == "__main__":
    main()
