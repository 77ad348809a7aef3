"""Stand-ins for SLURM and for the clock in unit tests. Standard library only: programs import this module too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

UNREACHABLE = "Unable to contact slurm controller (connect failure)"
COMMANDS = ("squeue", "scontrol", "sacct", "scancel", "sbatch", "srun")
PROGRAM = """\
#!{python} -SE
import sys
sys.path.insert(0, {folder!r})
from fakes import main
main()
"""
NODE = "NodeName={} State={} SlurmdStartTime={} Reason=None\n"


def manifest(step: int) -> bytes:
    """The manifest of an empty checkpoint: with it, a directory of that step is complete."""
    from hpctrain.run.checkpoint_manifest import ALGORITHM, FORMAT_VERSION, encode_manifest

    numbers = {"step": step, "samples_seen": 0, "world_size": 1, "time": 1.0, "files": {}}
    digests = {"config_digest": "", "weights_digest": ""}
    return encode_manifest({"format_version": FORMAT_VERSION, "algorithm": ALGORITHM, **numbers, **digests})


class Clock:
    """A clock that stands still until a test sets `now`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class RefusedError(Exception):
    """A command failed: its message on stderr."""


class KilledError(Exception):
    """SIGTERM ended a command."""


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
            self._install(name, PROGRAM.format(python=sys.executable, folder=str(Path(__file__).parent)))
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

    def plan(self, *attempts: Mapping[str, object]) -> None:
        """What srun does in each attempt; see `_Programs.srun`."""
        # the program has no package: it gets the manifests of its checkpoints from here
        steps = {int(str(step)) for act in attempts for step in act.get("saves", ())}  # type: ignore[attr-defined]
        (self.home / "manifests.json").write_text(json.dumps({step: manifest(step).decode() for step in steps}))
        (self.home / "plan.json").write_text(json.dumps(attempts))

    def let_ranks_end(self) -> None:
        """End the steps whose plan has `waits`."""
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
    def watched(self) -> str:
        """What the watched file held at the last scancel."""
        return (self.home / "watched").read_text()

    # how they are called

    def run(self, arguments: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> str:
        """As `hpctrain.scheduler.command.run`.

        Raises:
            SchedulerError: as that function does.
        """
        from hpctrain.errors import SchedulerError
        from hpctrain.scheduler.command import SchedulerSilentError, UnknownJobError

        try:
            with self._lock:
                return str(getattr(_Programs(self.home), arguments[0])(*arguments[1:]))
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


class _Programs:
    """The commands: each method returns what its command prints."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def squeue(self, *words: str) -> str:
        options = dict(word.lstrip("-").partition("=")[::2] for word in words)
        self._record("questions", str(options.get("jobs")))
        self._answer_or_not("squeue")
        if "steps" in options:
            name = (self.home / "step_name").read_text()
            steps = json.loads((self.home / "running_steps.json").read_text())
            others = f"{options['jobs']}.90|bash\n{options['jobs']}.batch|batch\n"
            return others + "".join(f"{step}|{name}\n" for step in steps)
        jobs, asked = json.loads((self.home / "queue.json").read_text()), options["jobs"].split(",")
        if len(asked) == 1 and asked[0] not in jobs:
            raise RefusedError("slurm_load_jobs error: Invalid job id specified")
        rows = []
        for job_id in asked:
            if job_id in jobs:
                known = {**dict.fromkeys(["JobID", "RestartCnt", "Requeue"], "0"), "JobArrayID": job_id}
                columns = [item.partition(":") for item in options["Format"].split(",")]
                rows.append("".join((known | jobs[job_id]).get(name, "N/A") + end for name, _, end in columns) + "\n")
        return "".join(rows)

    def scontrol(self, *options_and_words: str) -> str:
        words = [word for word in options_and_words if not word.startswith("-")]
        self._answer_or_not("scontrol")
        if words[0] == "requeue":
            self._record("requeued", words[1])
            if self._once("kills"):
                raise KilledError
            if (self.home / "refuses").exists():
                raise RefusedError(f"Requested operation is presently disabled for job {words[1]}")
            return ""
        if words[0] == "update":
            self._record("updated", " ".join(words[1:]))
            if (self.home / "refuses_updates").exists():
                raise RefusedError(f"Job is no longer pending execution for job {words[1].partition('=')[2]}")
            return ""
        if words[1] == "config":
            path = self.home / "config"
            self._record("asked_config", words[1])
            return path.read_text() if path.exists() else "MaxArraySize            = 1001\n"
        answer = (self.home / {"job": "job", "node": "nodes"}[words[1]]).read_text()
        if not answer:
            raise RefusedError(f"slurm_load_jobs error: {UNREACHABLE}")
        return answer + "\n"

    def sacct(self, *words: str) -> str:
        raise RefusedError("Slurm accounting storage is disabled")

    def scancel(self, *words: str) -> str:
        watched = self.home / "watch"
        if watched.exists():
            (self.home / "watched").write_text(Path(watched.read_text()).read_text())
        self._answer_or_not("scancel")
        self._record("cancelled", " ".join(words))
        if words[0].startswith("--signal="):
            return self._signal_step(*words)
        path = self.home / "queue.json"
        jobs = json.loads(path.read_text())
        for job_id in words:
            jobs.setdefault(job_id, {})["State"] = "CANCELLED"
        path.write_text(json.dumps(jobs))
        return ""

    def _signal_step(self, option: str, step: str) -> str:
        path = self.home / "running_steps.json"
        steps = json.loads(path.read_text())
        if step not in steps:
            raise RefusedError(f"Kill job error on job step id {step}: Invalid job id specified")
        if steps[step] == option.partition("=")[2]:
            del steps[step]
        path.write_text(json.dumps(steps))
        return ""

    def sbatch(self, *words: str) -> str:
        self._answer_or_not("sbatch")
        self._record("submitted", Path(words[-1]).read_text())
        return "Submitted batch job 8\n"

    def srun(self, *words: str) -> str:
        """Play the ranks of an attempt, by a plan for it; all keys may be missing.

        warns: printed on stderr first; places: by rank, its node, or null for one that never begins (by default they
        are on the step's nodes in turn); waits: until `let_ranks_end`; start: the step of the ledger's start entry;
        saves: steps of checkpoints; ranks: by rank the reason, step and further fields of its exit record; job, nodes:
        what scontrol prints from then on; touches: folders of the run directory to make; hides: a file of it to
        replace by a broken link; says: printed on stderr last; code: the exit code.
        """
        run, attempt = Path(words[-1]), int(os.environ["HPCTRAIN_CLAIM"])
        self._record("steps", " ".join(word for word in words if "no" in word or "--mem" in word))
        plan = json.loads((self.home / "plan.json").read_text())
        act = plan[min(attempt, len(plan)) - 1]
        print(act.get("warns", ""), end="", file=sys.stderr, flush=True)
        self._begin_ranks(run / "attempts" / f"{attempt:04d}", words, act.get("places", {}))
        if "waits" in act:
            self._wait_for("go")
        if act.get("start") is not None:
            entry = {"event": "start", "attempt": attempt, "job_id": "7", "nodes": ["n1", "n2"], "world_size": 2}
            with (run / "attempts.jsonl").open("a") as ledger:
                print(json.dumps(entry | {"step": act["start"], "time": 1.0}), file=ledger)
        for step in act.get("saves", ()):
            path = run / "checkpoints" / f"step_{step:08d}"
            path.mkdir(parents=True, exist_ok=True)
            (path / "manifest.json").write_text(json.loads((self.home / "manifests.json").read_text())[str(step)])
        for rank, (reason, step, more) in act.get("ranks", {}).items():
            record = {"rank": int(rank), "host": f"n{int(rank) + 1}", "reason": reason, "step": step, **more}
            (run / "attempts" / f"{attempt:04d}" / f"rank_{rank}.json").write_text(json.dumps(record))
        for name in {"job", "nodes"} & act.keys():
            (self.home / name).write_text(act[name])
        for path in act.get("touches", ()):
            (run / path).mkdir()
        if "hides" in act:
            hidden = run / act["hides"]
            hidden.rename(hidden.with_suffix(".hidden"))
            hidden.symlink_to(f"gone/{act['hides']}")
        print(act.get("says", ""), end="", file=sys.stderr, flush=True)
        sys.exit(act.get("code", 0))

    def _begin_ranks(self, claim: Path, words: Sequence[str], places: Mapping[str, str | None]) -> None:
        options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
        nodes = [f"n{number + 1}" for number in range(int(options["--nodes"]))]
        nodes = options["--nodelist"].split(",") if "--nodelist" in options else nodes
        per_node = int(options["--ntasks-per-node"])
        for rank in range(min(int(options["--ntasks"]), len(nodes) * per_node)):
            if (node := places.get(str(rank), nodes[rank // per_node])) is not None:
                record = {"rank": rank, "node": node, "host": f"{node}.example", "pid": 1, "time": 1.0}
                (claim / f"start_{rank}.json").write_text(json.dumps(record))

    def _wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 150  # its test has failed by then
        while not (self.home / name).exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _answer_or_not(self, command: str) -> None:
        path = self.home / f"silent_{command}"
        left = int(path.read_text()) if path.exists() else 0
        if left:
            path.write_text(str(left - 1))
            raise RefusedError(f"{command}: error: {UNREACHABLE}")

    def _once(self, name: str) -> bool:
        """Whether the state has this file, which goes."""
        with contextlib.suppress(FileNotFoundError):
            (self.home / name).unlink()
            return True
        return False

    def _record(self, name: str, line: str) -> None:
        with (self.home / name).open("a") as record:
            print(line, file=record)


def main() -> None:
    """Be the program by whose name this process was started."""
    program = Path(sys.argv[0])
    try:
        print(getattr(_Programs(program.parent), program.name)(*sys.argv[1:]), end="")
    except KilledError:
        signal.raise_signal(signal.SIGTERM)
    except RefusedError as error:
        sys.exit(str(error))
