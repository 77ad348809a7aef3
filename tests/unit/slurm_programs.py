"""SLURM's commands, as programs that `fakes.FakeSlurm` installs. Hundreds are started, so this imports little."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

UNREACHABLE = "Unable to contact slurm controller (connect failure)"


class RefusedError(Exception):
    """A command failed: its message on stderr."""


class KilledError(Exception):
    """SIGTERM ended a command."""


class Programs:
    """The commands: each method returns what its command prints.

    Args:
        home: the folder of the programs and of SLURM's state.
    """

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
        """Play the planned step of an attempt, as `fakes.Step` describes it; the ranks' files are written already."""
        run, attempt = Path(words[-1]), int(os.environ["HPCTRAIN_CLAIM"])
        self._record("steps", " ".join(word for word in words if "no" in word or "--mem" in word))
        planned = self.home / "plan" / f"{attempt:04d}"
        if not planned.exists():
            self._record("unplanned", str(attempt))
            raise RefusedError(f"the test planned no step for attempt {attempt}")
        step = SimpleNamespace(**json.loads((planned / "step.json").read_text()))
        print(step.warning, end="", file=sys.stderr, flush=True)
        _put_files(planned / "begun", run)
        if step.waits:
            self._wait_for("go")
        _put_files(planned / "ended", run)
        for name, answer in (("job", step.job), ("nodes", step.nodes)):
            if answer is not None:
                (self.home / name).write_text(answer)
        if step.is_superseded:
            (run / "attempts" / f"{attempt + 1:04d}").mkdir()
        if step.hides:
            hidden = run / step.hides
            hidden.rename(hidden.with_suffix(".hidden"))
            hidden.symlink_to(f"gone/{step.hides}")
        print(step.stderr, end="", file=sys.stderr, flush=True)
        sys.exit(step.exit_code)

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
        try:
            (self.home / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _record(self, name: str, line: str) -> None:
        with (self.home / name).open("a") as record:
            print(line, file=record)


def _put_files(prepared: Path, run: Path) -> None:
    """Copy the files of a folder into a run directory; logs and ledgers grow by theirs."""
    for folder, _, names in os.walk(prepared):
        place = run / Path(folder).relative_to(prepared)
        place.mkdir(parents=True, exist_ok=True)
        for name in names:
            with (place / name).open("ab" if name.endswith(".jsonl") else "wb") as file:
                file.write(Path(folder, name).read_bytes())


def main() -> None:
    """Be the program by whose name this process was started."""
    program = Path(sys.argv[0])
    try:
        print(getattr(Programs(program.parent), program.name)(*sys.argv[1:]), end="")
    except KilledError:
        signal.raise_signal(signal.SIGTERM)
    except RefusedError as error:
        sys.exit(str(error))
