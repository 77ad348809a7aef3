"""Stand-ins for SLURM and for the clock in unit tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.run.checkpoint_manifest import ALGORITHM, FORMAT_VERSION, MANIFEST, encode_manifest
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord
from hpctrain.run.ledger import Ledger
from hpctrain.run.reason import Reason
from hpctrain.run.start_record import StartRecord
from hpctrain.scheduler.command import SchedulerSilentError, UnknownJobError
from tests.unit.slurm_programs import UNREACHABLE, KilledError, Programs, RefusedError

COMMANDS = ("squeue", "scontrol", "sacct", "scancel", "sbatch", "srun")
PROGRAM = """\
#!{python} -SE
import sys
sys.path.insert(0, {folder!r})
from tests.unit.slurm_programs import main
main()
"""
NODE = "NodeName={} State={} SlurmdStartTime={} Reason=None\n"
NODES = ("n1", "n2")
PLAYED = ("warning", "waits", "job", "nodes", "is_superseded", "hides", "stderr", "exit_code")
"""Fields of a `Step` that the program reads; the others are files."""


def manifest(step: int) -> bytes:
    """The manifest of an empty checkpoint: with it, a directory of that step is complete."""
    numbers = {"step": step, "samples_seen": 0, "world_size": 1, "time": 1.0, "files": {}}
    digests = {"config_digest": "", "weights_digest": ""}
    return encode_manifest({"format_version": FORMAT_VERSION, "algorithm": ALGORITHM, **numbers, **digests})


def exit_record(rank: int, reason: str, step: int, **more: object) -> ExitRecord:
    """The exit record of a rank, on the node of its number."""
    return ExitRecord(**{"rank": rank, "host": f"n{rank + 1}", "reason": Reason(reason), "step": step} | more)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One srun: what its ranks leave in the run directory, and what else a test sees of it.

    Attributes:
        warning: What srun prints on stderr first.
        begun: The nodes of the ranks that record their start, by rank.
        waits: Whether all that follows waits for `FakeSlurm.let_ranks_end`.
        start: The step of the attempt's start record; None: the ranks don't get so far.
        saves: The steps of their checkpoints.
        exits: Their exit records.
        job: What `scontrol show job` prints from then on; None: what it printed before.
        nodes: As `job`, of `scontrol show node`.
        is_superseded: Whether another supervisor claims the next attempt.
        hides: A file of the run directory that becomes a broken link.
        stderr: What srun prints on stderr last.
        exit_code: Of srun.
    """

    warning: str = ""
    begun: Mapping[int, str] = field(default_factory=lambda: dict(enumerate(NODES)))
    waits: bool = False
    start: int | None = None
    saves: Sequence[int] = ()
    exits: Sequence[ExitRecord] = ()
    job: str | None = None
    nodes: str | None = None
    is_superseded: bool = False
    hides: str = ""
    stderr: str = ""
    exit_code: int = 0

    def write(self, folder: Path, attempt: int) -> None:
        """Write the files of its ranks, and `step.json` for the program."""
        begun, ended = (RunDirectory.at(folder / name) for name in ("begun", "ended"))
        for directory in (begun, ended):
            directory.attempt(attempt).mkdir(parents=True)
        for rank, node in self.begun.items():
            StartRecord(rank=rank, node=node, host=f"{node}.example", pid=1, time=1.0).write(begun.attempt(attempt))
        if self.start is not None:
            ledger = Ledger(ended, clock=lambda: 1.0)
            ledger.start(attempt, job_id="7", nodes=NODES, world_size=2, step=self.start)
        for step in self.saves:
            ended.checkpoint(step).mkdir(parents=True)
            (ended.checkpoint(step) / MANIFEST).write_bytes(manifest(step))
        for record in self.exits:
            record.write(ended.attempt(attempt))
        (folder / "step.json").write_text(json.dumps({name: getattr(self, name) for name in PLAYED}))


class Clock:
    """A clock that stands still until a test sets `now`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class FakeSlurm:
    """SLURM's commands as version 22.05 answers them, without a cluster and without accounting.

    Pass `run` to `hpctrain.scheduler.slurm.Slurm`, and no process is started. What starts commands by itself (submitit,
    the supervisor's `srun`, the command line) finds them as programs by `environ["PATH"]`. All state is in files of
    `home`, so both see the same.

    Attributes:
        home: the folder of the programs and of the state.
        environ: a job's environment, with the programs in PATH.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._lock = threading.Lock()
        home.mkdir(exist_ok=True)
        for name in COMMANDS:
            self._install(name, PROGRAM.format(python=sys.executable, folder=str(Path(__file__).parents[2])))
        self.queue()
        self.run_steps()
        self.environ = {
            "PATH": f"{home}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }

    # what the commands answer

    def script(self, command: str, text: str) -> None:
        """Replace a program by a shell script; `run` doesn't use it."""
        self._install(command, f"#!/bin/sh\n{text}\n")

    def job(self, answer: str) -> None:
        """What `scontrol show job` prints, whichever the job; "": the controller doesn't answer."""
        (self.home / "job").write_text(answer)

    def nodes(self, *nodes: tuple[str, str, int]) -> None:
        """What `scontrol show node` prints of the nodes: name, state, and when slurmd started."""
        (self.home / "nodes").write_text("".join(NODE.format(*node) for node in nodes))

    def queue(self, **jobs: Mapping[str, str]) -> None:
        """The jobs that squeue knows: fields by job id, which is written j12_3 for 12_3."""
        (self.home / "queue.json").write_text(json.dumps({name[1:]: fields for name, fields in jobs.items()}))

    def plan(self, *steps: Step, first: int = 1) -> None:
        """Let srun play these steps, one per attempt from the attempt `first` on."""
        for attempt, step in enumerate(steps, start=first):
            folder = self.home / "plan" / f"{attempt:04d}"
            shutil.rmtree(folder, ignore_errors=True)
            step.write(folder, attempt)

    def let_ranks_end(self) -> None:
        """End the steps that wait."""
        (self.home / "go").touch()

    def config(self, **settings: object) -> None:
        """What `scontrol show config` prints; by default a MaxArraySize of 1001."""
        (self.home / "config").write_text("".join(f"{name:<23} = {value}\n" for name, value in settings.items()))

    def take_jobs(self, most: int, refusal: str) -> None:
        """Let sbatch submit jobs 1, 2, ..., and refuse those after so many with this message on stderr."""
        count = f"n=$(($(cat {self.home}/count 2>/dev/null || echo 0) + 1))"
        keep = f"echo $n > {self.home}/count; cat $1 >> {self.home}/submitted; echo Submitted batch job $n"
        self.script("sbatch", f"{count}\n[ $n -gt {most} ] && {{ echo '{refusal}' >&2; exit 1; }}\n{keep}")

    def fall_silent(self, command: str, times: int = 1_000_000) -> None:
        """The controller doesn't answer the next `times` calls of a command."""
        (self.home / f"silent_{command}").write_text(str(times))

    def refuse_requeues(self, refused: bool = True) -> None:
        """The site forbids requeueing, or allows it again."""
        with contextlib.suppress(FileNotFoundError):
            (self.home / "refuses").unlink()
        if refused:
            (self.home / "refuses").touch()

    def refuse_updates(self) -> None:
        """The controller changes no job, as one that runs."""
        (self.home / "refuses_updates").touch()

    def kill_next_requeue(self) -> None:
        """SLURM's signal for the job ends the next `scontrol requeue` too, once the controller has its request."""
        (self.home / "kills").touch()

    def run_steps(self, name: str = "bash", **steps: str) -> None:
        """The steps of this name that squeue shows, and the signal that ends each; s7_0 stands for 7.0.

        Each job also has steps of other names, numbered from 90.
        """
        running = {step[1:].replace("_", ".", 1): ended_by for step, ended_by in steps.items()}
        (self.home / "running_steps.json").write_text(json.dumps(running))
        (self.home / "step_name").write_text(name)

    def watch(self, path: Path) -> None:
        """Keep what a file holds when scancel is called, for `watched`."""
        (self.home / "watch").write_text(str(path))

    # what they were asked

    @property
    def questions(self) -> list[str]:
        """The jobs that squeue was asked about, one entry per call."""
        return self._lines("questions")

    @property
    def num_config_questions(self) -> int:
        """How often `scontrol show config` was called."""
        return len(self._lines("asked_config"))

    @property
    def requeued(self) -> list[str]:
        """The jobs that `scontrol requeue` was called with, refused or not."""
        return self._lines("requeued")

    @property
    def updated(self) -> list[str]:
        """The words of each `scontrol update`, refused or not."""
        return self._lines("updated")

    @property
    def cancelled(self) -> list[str]:
        """The arguments of each scancel that reached the controller or tried to."""
        return self._lines("cancelled")

    @property
    def submitted(self) -> str:
        """The batch scripts that sbatch was given, one after the other."""
        return "\n".join(self._lines("submitted"))

    @property
    def steps(self) -> list[str]:
        """The options of each srun that choose nodes and memory."""
        return self._lines("steps")

    @property
    def unplanned(self) -> list[str]:
        """The attempts for which srun was started although no step was planned."""
        return self._lines("unplanned")

    @property
    def watched(self) -> str:
        """What the watched file held at the last scancel."""
        return (self.home / "watched").read_text()

    # how they are called

    def run(self, arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> str:
        """As `hpctrain.scheduler.command.run`.

        Raises:
            SchedulerError: as that function does.
        """
        try:
            with self._lock:
                return str(getattr(Programs(self.home), arguments[0])(*arguments[1:]))
        except KilledError:
            raise SchedulerSilentError(f"{arguments[0]}: ended by SIGTERM, without an answer") from None
        except RefusedError as error:
            message = str(error)
            kind = SchedulerError
            if UNREACHABLE in message or "accounting storage is disabled" in message:
                kind = SchedulerSilentError
            if "Invalid job id" in message:
                kind = UnknownJobError
            raise kind(f"{' '.join(arguments)}: {message}") from None

    def _install(self, command: str, text: str) -> None:
        (self.home / command).write_text(text)
        (self.home / command).chmod(0o755)

    def _lines(self, name: str) -> list[str]:
        path = self.home / name
        return path.read_text().splitlines() if path.exists() else []
