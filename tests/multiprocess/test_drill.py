"""Drills on this machine: of trainings that are exact, and of one that isn't."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger

TASKS = """
import time

from torch.utils.data import Subset

from hpctrain.tasks.digits import Digits
from hpctrain.tasks.text import Text


class SlowText(Text):
    def eval_dataset(self):
        return Subset(super().eval_dataset(), range(9))

    def loss(self, model, batch):
        time.sleep(0.03)
        return super().loss(model, batch)


class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(0.03)
        return super().loss(model, batch)


class Counting(Digits):
    calls = 0

    def loss(self, model, batch):
        time.sleep(0.03)
        self.calls += 1  # lost with the process: that is what resuming can't know of
        return super().loss(model, batch) * (1 + self.calls / 1000)


class Failing(Digits):
    def loss(self, model, batch):
        raise ValueError("no luck today")
"""
"""Below, seeds that interrupt early: however late a stop is noticed, there are steps left."""
PROGRAMS = Path(__file__).parent / "programs"
FOREIGN = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "HPCTRAIN")


@pytest.fixture
def drill(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TASKS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environ |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"}

    def start(*words):
        words = [*words, "run_dir=here"] if "--" not in words else words
        return subprocess.Popen(
            # `nohup bash tests/run-nightly` ignores SIGHUP, and so would the drill
            ["env", "--default-signal=HUP", sys.executable, "-m", "hpctrain", "drill", *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(*words, command=()):
        ending = ("run_dir=here", "--", *command) if command else ()
        with start(*words, "--json", *ending) as process:
            output, progress = process.communicate(timeout=280)
        assert output, progress.decode()
        return process.returncode, json.loads(output), progress.decode()

    run.start = start
    return run


def own(task):
    return ["task=custom", f"task._target_=own.{task}"]


def drill_program(drill, *words, arguments=("120",)):
    """Drill programs/drilled.py with two ranks and one early interruption."""
    shutil.copy(PROGRAMS / "drilled.py", "drilled.py")
    words = ("cluster.processes_per_node=2", "--interruptions", "1", "--seed", "52", *words)
    return drill("run", *words, command=("python", "drilled.py", *arguments))


@pytest.mark.nightly
def test_a_program(drill):
    shutil.copy(PROGRAMS / "saved_by_numpy.py", ".")
    # the comparison imports the standard library's
    Path("filecmp.py").write_text("raise AssertionError('imported')")
    code, report, progress = drill("run", "--interruptions", "1", command=("python", "saved_by_numpy.py", "20"))
    assert code == 0, progress
    assert report["exact"]
    (interruption,) = report["interruptions"]
    stopped = interruption["step"]
    assert 0 < stopped <= 10
    assert attempts() == [(0, "interrupted", stopped), (stopped, "completed", 20)]
    compared = {row["what"]: row["straight"] for row in report["compared"]}
    assert compared.keys() == {"steps", "save", "tensors", "train/distance"}
    assert (compared["steps"], compared["save"], compared["tensors"]) == ("20", "step_20.npz", "2")
    assert compared["train/distance"].endswith("20 values")


@pytest.mark.nightly
def test_a_program_with_two_ranks(drill):
    code, report, progress = drill_program(drill)
    assert code == 0, progress
    assert report["exact"]
    (interruption,) = report["interruptions"]
    stopped = interruption["step"]
    assert 0 < stopped < 120
    assert attempts() == [(0, "interrupted", stopped), (stopped, "completed", 120)]
    compared = {row["what"]: row["straight"] for row in report["compared"]}
    assert compared.keys() == {"steps", "save", "tensors", "train/loss"}
    assert (compared["steps"], compared["save"], compared["tensors"]) == ("120", "step_120.pt", "8")
    assert compared["train/loss"].endswith("120 values")


@pytest.mark.nightly  # the gate compares differing saves in tests/unit
def test_a_program_that_does_not_restore_its_optimizer_is_found_out(drill):
    code, report, progress = drill_program(drill, "--tolerance", "1e-9", arguments=("120", "1"))
    assert code == 1, progress
    (interruption,) = report["interruptions"]
    differing = {row["what"]: row["difference"] for row in report["compared"] if not row["equal"]}
    assert differing.keys() == {"tensors", "train/loss"}
    # the step after the stop has the saved weights
    assert differing["train/loss"].startswith(f"first after step {interruption['step'] + 2}: ")


def attempts():
    found = Ledger(RunDirectory.at("here/interrupted")).attempts()
    return [(entry.start_step, str(entry.reason), entry.end_step) for entry in found]


@pytest.mark.nightly  # the gate has the drill on SLURM
def test_one_process(drill):
    code, report, progress = drill(*own("Slow"), "--interruptions", "2", "--seed", "42", "trainer.max_steps=100")
    assert code == 0, progress
    assert report["exact"]
    first, second = (one["step"] for one in report["interruptions"])
    assert second > 20  # the first evaluation
    assert attempts() == [(0, "interrupted", first), (first, "interrupted", second), (second, "completed", 100)]
    compared = {row["what"]: row["straight"] for row in report["compared"]}
    assert compared["steps"] == "100"
    assert compared["train/loss"].endswith("100 values")
    assert compared["eval/accuracy"].endswith("5 values")
    assert compared["samples by rank"] == "of 100 steps"
    assert Ledger(RunDirectory.at("here/straight")).last_claim() == 1


@pytest.mark.nightly
def test_two_processes(drill):
    words = ("cluster.processes_per_node=2", "--interruptions", "1", "--seed", "52", "--remove")
    code, report, progress = drill(*own("Slow"), *words)
    assert code == 0, progress
    assert len(report["interruptions"]) == 1
    assert not Path("here").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world_size", "mesh"),
    [
        (2, ["parallel=fsdp"]),
        (4, ["parallel=hsdp", "parallel.shard_degree=2"]),
        (2, ["parallel=tp"]),
        (4, ["parallel=fsdp_tp", "parallel.tensor_degree=2"]),
        (2, ["parallel=pp"]),
        (4, ["parallel=pp", "parallel.pipeline_degree=2", "parallel.shard_degree=2", "parallel.stages_per_rank=1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_ranks_that_share_a_model(drill, world_size, mesh):
    words = ["task=text", "task._target_=own.SlowText", "model.width=32", "model.num_layers=2", "model.dropout=0.1"]
    words += [f"cluster.processes_per_node={world_size}", "trainer.global_batch_size=16", "trainer.ema_decay=0.9"]
    words += ["trainer.micro_batch_size=4", "task.context_length=32", "trainer.max_steps=40"]
    code, report, progress = drill(*words, *mesh, "--interruptions", "2", "--seed", "42")
    assert code == 0, f"{report}\n{progress}"
    assert report["exact"]
    assert len(report["interruptions"]) == 2
    assert [reason for _, reason, _ in attempts()] == ["interrupted", "interrupted", "completed"]
    compared = {row["what"] for row in report["compared"]}
    assert compared > {"weights digest", "train/loss", "eval/loss", "samples by rank"}


@pytest.mark.nightly  # the gate compares differing runs in tests/unit/drill
def test_what_a_task_keeps_to_itself_is_found_out(drill):
    code, report, _ = drill(*own("Counting"), "--interruptions", "1", "trainer.max_steps=100", "--seed", "17")
    assert code == 1
    (interruption,) = report["interruptions"]
    differing = {row["what"]: row["difference"] for row in report["compared"] if not row["equal"]}
    assert differing.keys() >= {"weights digest", "train/loss"}
    assert differing["train/loss"].startswith(f"first after step {interruption['step'] + 1}: ")
    assert {"steps", "samples by rank", "train/lr"}.isdisjoint(differing)


@pytest.mark.nightly
def test_a_program_that_fails_says_why(drill):
    Path("failing.py").write_text("raise ValueError('no luck today')")
    with drill.start("run", "run_dir=here", "--", "python", "failing.py") as process:
        output, error = process.communicate(timeout=60)
    assert process.returncode == 1, output
    *quoted, advice = error.decode().splitlines()
    assert "  ValueError: no luck today" in quoted
    assert advice == "once the cause is fixed, remove here and repeat the drill with the command as typed"
    # to resume one of its runs proves nothing
    assert "resume" not in error.decode()


@pytest.mark.nightly
def test_a_training_that_fails_says_why(drill):
    with drill.start(*own("Failing")) as process:
        output, error = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "ValueError: no luck today" in error.decode()
    assert "resume" not in error.decode()


def stop_when_it_runs(process, *numbers):
    """Send these signals to a drill whose straight run has completed a step; return its errors."""
    metrics, deadline = Path("here/straight/metrics.jsonl"), time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in numbers:
        process.send_signal(number)
    _, error = process.communicate(timeout=60)
    return error.decode()


def require_none_left():
    """Require that no process of the drill lives."""
    deadline = time.monotonic() + 15
    while left := [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(Path.cwd()).encode() in read(path)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ((signal.SIGTERM, signal.SIGTERM), "SIGTERM"),  # as of timeout
        ((signal.SIGHUP,), "SIGHUP"),
        ((signal.SIGINT,), "Ctrl-C"),
    ],
)
def test_a_signal_ends_the_program_too(drill, numbers, name):
    shutil.copy(PROGRAMS / "saved_by_numpy.py", ".")
    with drill.start("run", "run_dir=here", "--", "python", str(Path("saved_by_numpy.py").resolve()), "0") as process:
        error = stop_when_it_runs(process, *numbers)
    assert process.returncode == 4, error
    assert error.endswith(f"{name} stopped the drill and its runs, which proves nothing. They are in here\n")
    (attempt,) = Ledger(RunDirectory.at("here/straight")).attempts()
    assert str(attempt.reason) == "interrupted"
    require_none_left()


@pytest.mark.nightly
def test_a_killed_drill_leaves_no_process(drill):
    shutil.copy(PROGRAMS / "saved_by_numpy.py", ".")
    with drill.start("run", "run_dir=here", "--", "python", str(Path("saved_by_numpy.py").resolve()), "0") as process:
        stop_when_it_runs(process, signal.SIGKILL)
    require_none_left()


@pytest.mark.nightly
def test_ctrl_c_ends_the_training_too(drill):
    with drill.start(*own("Slow"), "trainer.max_steps=100000") as process:
        error = stop_when_it_runs(process, signal.SIGINT)
    assert process.returncode == 4, error
    (attempt,) = Ledger(RunDirectory.at("here/straight")).attempts()
    assert str(attempt.reason) == "interrupted"
    require_none_left()


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""
