"""A sandbox of a test's own, a folder for its runs, and the commands that start them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from disk import Disk
from trial import PATIENCE_S, Trial

from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory

if TYPE_CHECKING:
    from conftest import SlurmSandbox

PROGRAMS = Path(__file__).parent
BY_HAND = PROGRAMS.parents[2] / "slurm" / "train.sbatch"
STEPS = 80
PACE_S = 0.3
"""Of a step: where SLURM is some seconds late, a run has not come to its end before it is disturbed."""
COMMON = (
    *("task=custom", "task._target_=unlucky.Unlucky", "trainer.global_batch_size=8", f"trainer.max_steps={STEPS}"),
    *(
        "cluster.cpus_per_process=1",
        "logger.tensorboard=false",
        "logger.every_steps=1",
        "checkpoint.every_steps=100000",
    ),
)


class Stage:
    """What a staged test plays on.

    Args:
        sandbox: of its own.
        folder: for its runs.
        straight: gives digests of runs that nobody disturbs.
        disk: where the runs are; None: in the folder.

    Attributes:
        trials: the runs so far.
    """

    def __init__(
        self, sandbox: SlurmSandbox, folder: Path, straight: Callable[..., str], disk: Disk | None = None
    ) -> None:
        self.sandbox, self.folder, self.straight, self._disk = sandbox, folder, straight, disk
        self.trials: list[Trial] = []
        self._names = (f"run_{number}" for number in itertools.count())

    @property
    def disk(self) -> Disk:
        """Where the runs are."""
        assert self._disk is not None
        return self._disk

    def new(self, pace_s: float = PACE_S) -> Trial:
        """A run that isn't submitted yet."""
        name = next(self._names)
        home = self.folder if self._disk is None else self._disk.path
        trial = Trial(self.sandbox, home / name, pace_s, self.folder / f"{name}.pace")
        self.trials.append(trial)
        return trial

    def train(self, *words: str, pace_s: float = PACE_S, nodes: int = 2) -> Trial:
        """Submit a run, through the command line."""
        trial = self.new(pace_s)
        self.submit(trial, *words, nodes=nodes)
        return trial

    def submit(self, trial: Trial, *words: str, nodes: int = 2) -> None:
        """Submit a run, or what goes on with it."""
        done = self.sandbox.run(self._command(trial, words, nodes), cwd=self.folder, env=submitters_variables())
        assert done.returncode == 0, done.stdout + done.stderr
        trial.job_id = trial.newest_job

    def sweep(self, runs: int) -> list[Trial]:
        """Submit an array of runs of one node, which differ in their pace alone."""
        home = self.folder / next(self._names)
        trials = [
            Trial(self.sandbox, home / str(number), PACE_S, home.with_suffix(f".pace_{number}"))
            for number in range(runs)
        ]
        own = (f"run_dir={home}", "cluster=slurm", f"+task.pace={','.join(str(trial.pace) for trial in trials)}")
        command = [sys.executable, "-m", "hpctrain", "-m", *COMMON, *own]
        self.trials += trials
        done = self.sandbox.run(command, cwd=self.folder, env=submitters_variables())
        assert done.returncode == 0, done.stdout + done.stderr
        for trial in trials:
            trial.job_id = trial.newest_job
        return trials

    def by_hand(self, *options: str) -> Trial:
        """Submit slurm/train.sbatch, as its own text says."""
        trial = self.new()
        own = (f"run_dir={trial.directory.path}", f"+task.pace={trial.pace}")
        command = ["sbatch", "--parsable", f"--output={self.folder}/by_hand.log", *options, str(BY_HAND), *COMMON, *own]
        environ = {**submitters_variables(), "HPCTRAIN_PYTHON": sys.executable}
        done = self.sandbox.run(command, cwd=self.folder, env=environ)
        assert done.returncode == 0, done.stderr
        trial.job_id = done.stdout.strip()
        return trial

    @contextmanager
    def waiting(self, *words: str, pace_s: float = PACE_S, nodes: int = 2) -> Iterator[tuple[Trial, Callable[[], int]]]:
        """Submit a run with a command that waits for its end: the run, and a function for the command's exit code."""
        trial = self.new(pace_s)
        command = self._command(trial, ("cluster.wait=true", *words), nodes)
        environ = {**self.sandbox.environ, **submitters_variables()}
        with (
            (self.folder / "waiting").open("w") as output,
            subprocess.Popen(command, cwd=self.folder, env=environ, stdout=output, stderr=output) as process,
        ):
            trial.until(lambda: trial.directory.job_records() or process.poll() is not None, "the submission")
            assert trial.directory.job_records(), (self.folder / "waiting").read_text()
            trial.job_id = trial.newest_job
            yield trial, lambda: process.wait(PATIENCE_S)

    def _command(self, trial: Trial, words: Sequence[str], nodes: int) -> list[str]:
        own = (f"run_dir={trial.directory.path}", f"+task.pace={trial.pace}", f"nodes={nodes}", "cluster=slurm")
        return [sys.executable, "-m", "hpctrain", *COMMON, *own, *words]


def submitters_variables() -> dict[str, str]:
    """PYTHONPATH with the programs beside the tests."""
    places = [str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(places)}


class Straight:
    """Digests of runs that nobody interrupts, on this machine without SLURM; each is made once."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = Lock()
        self._made: dict[tuple[object, ...], str] = {}

    def __call__(self, *words: str, processes: int = 2) -> str:
        """The digest of the weights at the end."""
        with self._lock:
            key = (processes, *words)
            if key not in self._made:
                self._made[key] = self._train(processes, words)
            return self._made[key]

    def _train(self, processes: int, words: tuple[str, ...]) -> str:
        path = self._home / f"straight_{len(list(self._home.glob('straight_*')))}"
        command = [sys.executable, "-m", "hpctrain", *COMMON, f"run_dir={path}"]
        command += [f"cluster.processes_per_node={processes}", *words]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        done = subprocess.run(
            command,
            cwd=self._home,
            env=environ | submitters_variables(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return str(list_checkpoints(RunDirectory.at(path))[-1].weights_digest)
