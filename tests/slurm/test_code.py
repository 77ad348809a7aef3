"""Code that is edited while a job waits, and between two attempts: what was submitted runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmSandbox

    Done = subprocess.CompletedProcess[str]

HELD = ["cluster=slurm", "cluster.cpus_per_process=1", "cluster.sbatch.hold=true"]
TASK = """
import os, signal, time
from pathlib import Path

from hpctrain.tasks.digits import Digits
from versions.number import VERSION


class Versioned(Digits):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        self.log.scalar("version", VERSION)
        self.log.scalar("data", int(Path("data", "number.txt").read_text()))
        if self.calls == 4 and os.environ["HPCTRAIN_CLAIM"] == "1":
            while not Path("edited").exists():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""
PROGRAM = """
import os
from pathlib import Path

from versions.number import VERSION

print("version", VERSION, "data", Path("data", "number.txt").read_text(), "in", os.getcwd())
print("submitted in", os.environ["HPCTRAIN_SUBMIT_DIR"])
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a task, a program, a package that both import, and data that git ignores."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q", "."], check=True)
    for name, text in {
        "own.py": TASK,
        "program.py": PROGRAM,
        "versions/number.py": "VERSION = 1\n",
        "data/number.txt": "7",
        ".gitignore": "data/\nruns/\n__pycache__/\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def records(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(ready: Callable[[], object], timeout: float = 200) -> None:
    deadline = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < deadline, f"not so after {timeout:g} s"
        time.sleep(0.1)


def test_what_was_submitted_runs(sandbox: SlurmSandbox, work: Path) -> None:
    def submit(*words: str) -> str:
        done: Done = sandbox.run([sys.executable, "-m", "hpctrain", *words], cwd=work, timeout=120)
        assert done.returncode == 0, done.stderr
        found = re.search(r"submitted job (\d+)", done.stdout)
        assert found is not None, done.stdout
        return found[1]

    own = ["task=custom", "task._target_=own.Versioned", "model=mlp", "trainer.max_steps=6", "logger.every_steps=1"]
    training, program = work / "runs" / "training", work / "runs" / "program"
    jobs = [
        submit(*HELD, "nodes=2", *own, "logger.tensorboard=false", f"run_dir={training}"),
        submit("run", *HELD, f"run_dir={program}", "--", "python", "program.py"),
    ]
    (work / "versions" / "number.py").write_text("VERSION = 2\n")
    for job in jobs:
        sandbox.ask("scontrol", "release", job)
    wait_until(lambda: any("train/version" in one for one in records(training, "metrics.jsonl")))
    (work / "versions" / "number.py").unlink()
    (work / "own.py").write_text("raise SystemError('edited between two attempts')\n")
    (work / "edited").touch()
    for job in jobs:
        sandbox.wait_job(job, "COMPLETED")
    starts = [one for one in records(training, "attempts.jsonl") if one["event"] == "start"]
    (digest,) = {one["code"] for one in starts}
    assert len(starts) == 2
    assert (training / "code" / digest / "versions" / "number.py").read_text() == "VERSION = 1\n"
    logged = [one for one in records(training, "metrics.jsonl") if "train/version" in one]
    assert {(one["train/version"], one["train/data"]) for one in logged} == {(1.0, 7.0)}
    assert [one["step"] for one in logged] == [1, 2, 3, 4, 5, 6]
    printed = (program / "logs" / "rank_0.log").read_text()
    assert f"version 1 data 7 in {program}/code/" in printed
    assert f"submitted in {work}\n" in printed


COUNTS = """
import os, sys, time
from pathlib import Path

rank, value = int(os.environ["RANK"]), sys.argv[1]
out = Path("outputs", f"rank_{rank}.txt")
out.parent.mkdir(exist_ok=True)
before = out.read_text() if out.exists() else "nothing"
out.write_text(value)
print("value", value, "found", before, "data", Path("data", "number.txt").read_text(), flush=True)
Path(__file__).with_name(f"beside_{rank}").write_text(value)
# rank 1 mustn't die before rank 0 has printed
awaited = Path(os.environ["HPCTRAIN_SUBMIT_DIR"], "go"), Path(__file__).with_name("beside_0")
while before == "nothing" and not all(path.exists() for path in awaited):
    time.sleep(0.2)
os.kill(os.getpid(), 9) if before == "nothing" and rank == 1 else None
"""


@pytest.mark.nightly
def test_the_runs_of_a_program_s_array_write_for_themselves_on_two_nodes(sandbox: SlurmSandbox, work: Path) -> None:
    (work / "counts.py").write_text(COUNTS)
    (work / "outputs").mkdir()
    (work / "outputs" / "rank_0.txt").write_text("by hand")
    (work / ".gitignore").write_text("data/\noutputs/\nruns/\ngo\n")
    sweep = work / "runs" / "sweep"
    words = [*HELD, "nodes=2", f"run_dir={sweep}", "args.value=3,4"]
    command = [sys.executable, "-m", "hpctrain", "run", "-m", *words, "--", "python", "counts.py", "{args.value}"]
    done: Done = sandbox.run(command, cwd=work, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"submitted job array (\d+)", done.stdout)
    assert found is not None, done.stdout
    assert not any((sweep / name / "code").exists() for name in "01")  # submitting makes no links
    (work / "go").touch()
    sandbox.ask("scontrol", "release", found[1])
    for number in range(2):
        sandbox.wait_job(f"{found[1]}_{number}", "COMPLETED")
    for number, value in enumerate("34"):
        (folder,) = [path for path in (sweep / str(number) / "code").iterdir() if path.is_dir()]
        for rank in range(2):
            log = (sweep / str(number) / "logs" / f"rank_{rank}.log").read_text()
            lines = re.findall("^value .*", log, re.MULTILINE)
            assert lines == [f"value {value} found {before} data 7" for before in ("nothing", value)]
            assert (folder / f"beside_{rank}").read_text() == value
    assert (work / "outputs" / "rank_0.txt").read_text() == "by hand"
