"""A search on four nodes with hpctrain, and with Optuna's sweeper plugin for Hydra: wall time, and idle nodes.

    python tests/benchmarks/search_peers.py [--rounds 3] [--trials 16] [--mean-s 10] [--spread 4]

It starts a sandbox with SLURM's accounting (slurm/sandbox: root, and its packages), and takes it down at the end. Every
search has the same number of trials on four nodes, one trial per node at a time, with Optuna's TPE sampler and the same
seed. The searches of a round take turns, and each round begins with another one:

- `hpctrain`: `-m sweep=optuna cluster=slurm`, with hpctrain's defaults (checkpoint, metrics, TensorBoard, code copy)
  but for loading processes, of which the loop by hand has none either.
- `plugin`: hydra-optuna-sweeper and hydra-submitit-launcher with `hydra.sweeper.n_jobs=4`, around the shortest loop by
  hand. It submits four trials, and the next four when all four have ended: Hydra's launchers return whole batches
  (github.com/hydra-ecosystem/hydra/issues/3091).
- `four plugins`: what the maintainers advise there: four processes with `n_jobs=1` that share one study, here in a
  SQLite file. Each has a quarter of the trials, and has to live until it has ended. Only with `--sides`.
- `random`: `-m sweep=random` of hpctrain. Only with `--sides`.

Trial k takes equally long on all sides: its 50 steps sleep for a time that was drawn for k, not for its values. So the
samplers' choices don't change the work, and two cores suffice for four nodes. `--kinds varied` draws times whose
logarithm is uniform, the longest up to `--spread` times the shortest; with `equal` all trials take `--mean-s` seconds.

Shown are medians over the rounds, with the span in brackets:

- wall: seconds from typing the command until it has returned and no job is left. It includes the start of the command,
  and for the plugin the wait of submitit for each result, which is part of how it works.
- idle: the share of the four nodes' time in that span in which no job of the search ran, by sacct, to a second per job.
  The start of a job's processes (Python, Hydra, torch) counts as running.
- not training: the same, but only the steps' own time counts as used. It includes all start-up.

Start-up takes seconds, and so do these trials. With real ones, which take minutes or hours, what is left is the order
in which trials begin. The last lines show that part alone: the wall time of both orders by arithmetic, with no
start-up, for these times and for those of 1,000 other seeds.

The plugin requires Optuna 2, so it has a virtual environment of its own (`--venv`), made when it is missing and kept.
torch is shared with this Python. Packages are pinned: without a pin, hydra-core would be a pre-release, and SQLAlchemy
would be version 2, with which Optuna 2 can't keep a study in a file.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NODES = 4
CPUS_PER_NODE = 8
SPACE = "tag(log,interval(1e-4,1e-1))"
PINNED = (
    "hydra-core==1.3.8",
    "hydra-optuna-sweeper==1.3.0",
    "hydra-submitit-launcher==1.2.0",
    "submitit==1.5.4",
    "sqlalchemy<2",
)
SIDES = ("hpctrain", "plugin", "four plugins", "random")
POLL_S = 0.25
DEADLINE_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--mean-s", type=float, default=10.0)
    parser.add_argument("--spread", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0, help="of the times that trials take, and of the samplers")
    parser.add_argument("--kinds", nargs="+", choices=("varied", "equal"), default=["varied", "equal"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["hpctrain", "plugin"])
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "hydra-optuna-sweeper-venv")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the sandbox is taken down all the same
    make_venv(options.venv)
    found = {kind: dict[str, list[Measured]]() for kind in options.kinds}
    with sandbox() as environ, tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            first = number % len(options.sides)
            for kind, side in itertools.product(options.kinds, options.sides[first:] + options.sides[:first]):
                lengths = draw_lengths(kind, options.trials, options.mean_s, options.spread, options.seed)
                home = Path(folder) / f"{number}-{kind}-{side.replace(' ', '-')}"
                one = Search(home, side, lengths, options.seed, options.venv, environ).measure()
                found[kind].setdefault(side, []).append(one)
                print(f"# round {number + 1}, {kind}, {side}: {one.wall_s:.1f} s, {one.idle:.1%} idle", flush=True)
    for kind, sides in found.items():
        lengths = draw_lengths(kind, options.trials, options.mean_s, options.spread, options.seed)
        show(kind, sides, lengths)
        show_arithmetic(kind, options.trials, options.mean_s, options.spread, options.seed)


def draw_lengths(kind: str, trials: int, mean_s: float, spread: float, seed: int) -> list[float]:
    """Seconds of the steps of each trial, `mean_s` on average."""
    draws = random.Random(f"lengths {seed}")
    drawn = [spread ** draws.random() if kind == "varied" else 1.0 for _ in range(trials)]
    return [length * mean_s / statistics.mean(drawn) for length in drawn]


class Measured:
    """What one search took.

    Attributes:
        wall_s: Seconds from the command to the end of its last job.
        idle: Share of the nodes' time in which no job ran.
        not_training: Share of the nodes' time without training steps.
    """

    def __init__(self, wall_s: float, jobs_s: float, steps_s: float) -> None:
        self.wall_s = wall_s
        self.idle = 1 - jobs_s / (NODES * wall_s)
        self.not_training = 1 - steps_s / (NODES * wall_s)


class Search:
    """One search of one side, in a folder of its own with the two files of its trial."""

    def __init__(
        self, home: Path, side: str, lengths: Sequence[float], seed: int, venv: Path, environ: dict[str, str]
    ) -> None:
        home.mkdir()
        self.home, self.side, self.lengths, self.seed, self.name = home, side, lengths, seed, home.name
        self.python = str(venv / "bin" / "python")
        self.environ = {**environ, "PYTHONPATH": str(home)}
        for name in ("searched.py", "search_with_hpctrain.py", "search_with_plugin.py"):
            shutil.copy(HERE / "contenders" / name, home)
        (home / "lengths.json").write_text(json.dumps(lengths))

    def measure(self) -> Measured:
        commands = self._commands()
        began = time.monotonic()
        processes = [self._start(number, command) for number, command in enumerate(commands)]
        for process in processes:
            if process.wait(DEADLINE_S):
                sys.exit(f"{self.side} failed:\n" + "\n".join(log.read_text() for log in self.home.glob("typed_*.log")))
        while self._ask("squeue", "--noheader", f"--name={self.name}").strip():
            if time.monotonic() - began > DEADLINE_S:
                sys.exit(f"{self.side}: jobs are left after {DEADLINE_S} s")
            time.sleep(POLL_S)
        wall_s = time.monotonic() - began
        return Measured(wall_s, self._jobs_s(), sum(self.lengths))

    def _commands(self) -> list[list[str]]:
        trials, lengths = len(self.lengths), self.home / "lengths.json"
        if self.side in ("hpctrain", "random"):
            words = f"-m hpctrain -m cluster=slurm cluster.cpus_per_process={CPUS_PER_NODE} name={self.name}"
            words += f" sweep={'optuna' if self.side == 'hpctrain' else 'random'} sweep.seed={self.seed}"
            words += f" sweep.num_runs={trials} optimizer.lr={SPACE} optimizer=adamw run_dir={self.home}/runs"
            words += f" task=custom task._target_=search_with_hpctrain.Trial +task.lengths={lengths}"
            words += " trainer.max_epochs=1 trainer.global_batch_size=32 data.num_workers=0"
            return [[sys.executable, *words.split()]]
        words = f"search_with_plugin.py -m hydra/sweeper=optuna hydra/sweeper/sampler=tpe lr={SPACE} lengths={lengths}"
        words += f" hydra/launcher=submitit_slurm hydra.launcher.name={self.name}"
        words += f" hydra.launcher.cpus_per_task={CPUS_PER_NODE}"
        if self.side == "plugin":
            own = f" hydra.sweep.dir={self.home}/runs hydra.sweeper.sampler.seed={self.seed}"
            own += f" hydra.sweeper.n_trials={trials} hydra.sweeper.n_jobs={NODES}"
            return [[self.python, *(words + own).split()]]
        storage = f"sqlite:///{self.home}/study.db"
        create = f"import optuna; optuna.create_study(study_name='s', storage='{storage}')"
        subprocess.run([self.python, "-c", create], check=True, capture_output=True)
        each = -(-trials // NODES)
        words += f" hydra.sweeper.storage={storage} hydra.sweeper.study_name=s hydra.sweeper.n_jobs=1"
        return [
            # one seed each: with the same one, all would draw the same values
            [
                self.python,
                *words.split(),
                f"hydra.sweep.dir={self.home}/runs{first}",
                f"hydra.sweeper.sampler.seed={self.seed + first}",
                f"hydra.sweeper.n_trials={min(each, trials - first)}",
                f"first={first}",
            ]
            for first in range(0, trials, each)
        ]

    def _start(self, number: int, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.home / f"typed_{number}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=self.home, env=self.environ, stdout=log, stderr=subprocess.STDOUT)

    def _jobs_s(self) -> int:
        """Seconds of the search's jobs, added up; all must have completed."""
        deadline = time.monotonic() + 60
        while True:
            rows = self._ask(
                *("sacct", "--allocations", "--noheader", "--parsable2", f"--name={self.name}"),
                *("--starttime=now-1days", "--format=State,ElapsedRaw"),
            ).splitlines()
            ended = [int(row.partition("|")[2]) for row in rows if row.startswith("COMPLETED|")]
            if len(ended) == len(rows) == len(self.lengths):
                return sum(ended)
            if time.monotonic() > deadline:  # the database learns of an end a moment later
                sys.exit(f"{self.side}: expected {len(self.lengths)} completed jobs, found {rows}; see {self.home}")
            time.sleep(POLL_S)

    def _ask(self, *argv: str) -> str:
        return subprocess.run(argv, env=self.environ, capture_output=True, text=True, check=True).stdout


def show(kind: str, sides: dict[str, list[Measured]], lengths: Sequence[float]) -> None:
    print(
        f"\n{kind}: {len(lengths)} trials of {min(lengths):.1f} to {max(lengths):.1f} s, {sum(lengths):.0f} s together"
    )
    print(f"{'':<14}{'wall, s':>24}{'over hpctrain':>24}{'idle, %':>24}{'not training, %':>24}")
    for side, found in sides.items():
        base = sides.get("hpctrain", found)
        ratios = [one.wall_s / first.wall_s for one, first in zip(found, base, strict=True)]
        columns = [
            spanned([one.wall_s for one in found], 1),
            spanned(ratios, 2),
            spanned([100 * one.idle for one in found], 1),
            spanned([100 * one.not_training for one in found], 1),
        ]
        print(f"{side:<14}" + "".join(f"{column:>24}" for column in columns))


def show_arithmetic(kind: str, trials: int, mean_s: float, spread: float, seed: int) -> None:
    """The wall time of both orders without start-up."""
    batches_s, greedy_s = orders(draw_lengths(kind, trials, mean_s, spread, seed))
    print(
        f"by arithmetic: {batches_s:.1f} s in batches of {NODES}, {greedy_s:.1f} s if a free node takes the next trial"
    )
    found = [orders(draw_lengths(kind, trials, mean_s, spread, other)) for other in range(1000)]
    ratios = spanned([batches / greedy for batches, greedy in found], 2)
    print(f"               ratio {batches_s / greedy_s:.2f}; with 1,000 seeds {ratios}", flush=True)


def orders(lengths: Sequence[float]) -> tuple[float, float]:
    """Seconds of the trials in batches, and of the trials as nodes get free."""
    nodes = [0.0] * NODES
    for length in lengths:
        nodes[nodes.index(min(nodes))] += length
    return sum(max(lengths[first : first + NODES]) for first in range(0, len(lengths), NODES)), max(nodes)


def spanned(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f} .. {max(values):.{digits}f}]"


def make_venv(venv: Path) -> None:
    """Make the plugin's environment, unless an earlier call has."""
    python, made = venv / "bin" / "python", venv / "made.json"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("expected torch in this Python, whose packages the plugin's environment shares; found none")
    shared = str(Path(spec.origin).parents[1])
    if made.exists() and json.loads(made.read_text()) == [*PINNED, shared]:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--quiet", *PINNED], check=True)
    (folder,) = (venv / "lib").glob("python*/site-packages")
    (folder / "shared_torch.pth").write_text(shared + "\n")  # after its own packages, which therefore win
    subprocess.run([str(python), "-c", "import hydra, optuna, torch; assert optuna.__version__ < '3'"], check=True)
    made.write_text(json.dumps([*PINNED, shared]))


@contextmanager
def sandbox() -> Iterator[dict[str, str]]:
    """A SLURM of four nodes, with the environment that connects to it."""
    program, name = [sys.executable, str(ROOT / "slurm" / "sandbox")], f"search-peers-{os.getpid()}"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    try:
        subprocess.run([*program, "up", "--name", name, f"--nodes={NODES}", "--accounting"], check=True)
        yield {**inherited, "SLURM_CONF": f"/run/slurm-sandbox/{name}/slurm.conf"}
    finally:
        subprocess.run([*program, "down", "--name", name], check=True)


if __name__ == "__main__":
    main()
