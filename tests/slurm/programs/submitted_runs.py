"""Commands that submit runs to a sandbox, and the runs without SLURM that they are compared with."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.launch.local import free_port, rank_variables
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.job_records import JobRecords
from tests.slurm.programs.disk import Disk
from tests.slurm.programs.followed_run import TIMEOUT_S, FollowedRun

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox
    from tests.support.fork_server import ForkServer

PROGRAMS = Path(__file__).parent
BY_HAND = PROGRAMS.parents[2] / "slurm" / "train.sbatch"
STEPS = 80
PACE_S = 0.3
"""How long a step takes: long enough that a run is still training when SLURM is some seconds late."""
COMMON = (
    *(
        "task=custom",
        "task._target_=tests.slurm.programs.scripted_task.ScriptedTask",
        "trainer.global_batch_size=8",
        f"trainer.max_steps={STEPS}",
    ),
    *(
        "cluster.cpus_per_process=1",
        "logger.tensorboard=false",
        "logger.every_steps=1",
        "checkpoint.every_steps=100000",
    ),
)


class SubmittedRuns:
    """Submits runs of `ScriptedTask` to a sandbox.

    Args:
        sandbox: where they run.
        folder: an empty one, for the commands; the run directories are in it, unless there is a disk.
        straight: digests of uninterrupted runs.
        disk: a file system for the run directories.

    Attributes:
        runs: the runs so far.
    """

    def __init__(
        self, sandbox: SlurmSandbox, folder: Path, straight: Callable[..., str], disk: Disk | None = None
    ) -> None:
        self.sandbox = sandbox
        self.folder = folder
        self.straight = straight
        self.runs: list[FollowedRun] = []
        self._home = folder if disk is None else disk.path
        self._names = (f"run_{number}" for number in itertools.count())

    def new(self, pace_s: float = PACE_S) -> FollowedRun:
        """A run that isn't submitted yet."""
        name = next(self._names)
        run = FollowedRun(self.sandbox, self._home / name, pace_s, self.folder / f"{name}.pace")
        self.runs.append(run)
        return run

    def train(self, *words: str, pace_s: float = PACE_S, nodes: int = 2) -> FollowedRun:
        """Submit a run, through the command line."""
        run = self.new(pace_s)
        self.submit(run, *words, nodes=nodes)
        return run

    def submit(self, run: FollowedRun, *words: str, nodes: int = 2) -> None:
        """Submit a run, or submit it again."""
        done = self.sandbox.run(self._command(run, words, nodes), cwd=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        run.job_id = run.newest_job

    def launch(self, run: FollowedRun, command: Sequence[str], *words: str, nodes: int = 2) -> None:
        """Submit a run of a program, through the command line."""
        own = (f"run_dir={run.directory.path}", f"nodes={nodes}", "cluster=slurm", "cluster.cpus_per_process=1")
        # a copy of the pace, with the code, would keep its first value
        code = "code.exclude=[*.pace]"
        typed = [sys.executable, "-m", "hpctrain", "run", *own, code, *words, "--", *command]
        done = self.sandbox.run(typed, cwd=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        run.job_id = run.newest_job

    def sweep(self, count: int, *words: str) -> list[FollowedRun]:
        """Submit an array of runs of one node, which differ in their pace alone."""
        home = self.folder / next(self._names)
        runs = [
            FollowedRun(self.sandbox, home / str(number), PACE_S, home.with_suffix(f".pace_{number}"))
            for number in range(count)
        ]
        own = (f"run_dir={home}", "cluster=slurm", f"+task.pace={','.join(str(run.pace) for run in runs)}")
        command = [sys.executable, "-m", "hpctrain", "-m", *COMMON, *own, *words]
        self.runs += runs
        done = self.sandbox.run(command, cwd=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        for run in runs:
            run.job_id = run.newest_job
        return runs

    def by_hand(self, *options: str) -> FollowedRun:
        """Submit slurm/train.sbatch, as its own comments say."""
        run = self.new()
        own = (f"run_dir={run.directory.path}", f"+task.pace={run.pace}")
        command = ["sbatch", "--parsable", f"--output={self.folder}/by_hand.log", *options, str(BY_HAND), *COMMON, *own]
        environ = {"HPCTRAIN_PYTHON": sys.executable}
        done = self.sandbox.run(command, cwd=self.folder, env=environ)
        assert done.returncode == 0, done.stderr
        run.job_id = done.stdout.strip()
        return run

    @contextmanager
    def waiting(
        self, *words: str, pace_s: float = PACE_S, nodes: int = 2
    ) -> Iterator[tuple[FollowedRun, Callable[[], int]]]:
        """Submit a run with a command that waits for its end: the run, and a function for the command's exit code."""
        run = self.new(pace_s)
        command = self._command(run, ("cluster.wait=true", *words), nodes)
        environ = self.sandbox.environ
        with (
            (self.folder / "waiting").open("w") as output,
            subprocess.Popen(command, cwd=self.folder, env=environ, stdout=output, stderr=output) as process,
        ):
            run.until(lambda: JobRecords(run.directory).read() or process.poll() is not None, "the submission")
            assert JobRecords(run.directory).read(), (self.folder / "waiting").read_text()
            run.job_id = run.newest_job
            yield run, lambda: process.wait(TIMEOUT_S)

    def _command(self, run: FollowedRun, words: Sequence[str], nodes: int) -> list[str]:
        own = (f"run_dir={run.directory.path}", f"+task.pace={run.pace}", f"nodes={nodes}", "cluster=slurm")
        return [sys.executable, "-m", "hpctrain", *COMMON, *own, *words]


class Straight:
    """Digests of runs that nothing interrupts, without SLURM; each is made once.

    Args:
        home: a folder for them.
        fork_server: starts their ranks.
    """

    def __init__(self, home: Path, fork_server: ForkServer) -> None:
        self._home = home
        self._fork_server = fork_server
        self._runs: dict[tuple[object, ...], RunDirectory] = {}

    def __call__(self, *words: str, processes: int = 2) -> str:
        """The digest of the weights at the end."""
        return str(list_checkpoints(self.run(*words, processes=processes))[-1].weights_digest)

    def run(self, *words: str, processes: int = 2) -> RunDirectory:
        """The directory of a completed run."""
        key = (processes, *words)
        if key not in self._runs:
            self._runs[key] = self._train(processes, words)
        return self._runs[key]

    def _train(self, processes: int, words: tuple[str, ...]) -> RunDirectory:
        path, port = self._home / f"straight_{len(self._runs)}", free_port()
        command = [*COMMON, f"run_dir={path}", *words]
        places = [rank_variables(rank, processes, port) if processes > 1 else {} for rank in range(processes)]
        numbers = [self._fork_server.start("hpctrain.cli:main", command, **place) for place in places]
        for done in self._fork_server.wait(*numbers):
            assert done.code == 0, done.output
        return RunDirectory.at(path)
