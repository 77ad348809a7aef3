"""The program of a batch script, in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.root import ProgramConfig
from hpctrain.config.stored import load_run
from hpctrain.files import append_json_line
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from tests.unit.supervising import COMPLETES, KILLED, STOPS, ends, story, until

SUPERVISE = "import runpy; runpy.run_module('hpctrain.supervise', run_name='__main__')"
IN_ANOTHER_THREAD = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
import signal
unblock = signal.pthread_sigmask
# the main thread stays deaf: a SIGTERM finds another thread, and the main one keeps waiting for srun
signal.pthread_sigmask = lambda how, numbers: unblock(signal.SIG_BLOCK, numbers)
"""


@pytest.mark.parametrize("program", [SUPERVISE, IN_ANOTHER_THREAD + SUPERVISE], ids=["noticed", "while it waits"])
def test_no_sigterm_is_lost(slurm, supervisor, program):
    """On a full disk, which refuses the line about it; and while the main thread waits for what srun prints."""
    slurm.plan(ends("preempted", 14, waits=True))
    slurm.job(STOPS["preempted_cancel_without_grace"])
    one = supervisor()
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", program, one.directory.path]
        process = subprocess.Popen(command, stdout=full, stderr=subprocess.DEVNULL, env=slurm.environ)
    until(lambda: slurm.steps)
    process.send_signal(signal.SIGTERM)
    until(lambda: slurm.requeued)
    slurm.let_ranks_end()
    process.wait(60)
    assert story(one) == [(0, "preempted", 14, "requeue")]


LATE = """
import os
import signal


class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)


import builtins
builtins.late = Late()  # Python destroys it after it has restored the default signal handlers
"""


def test_a_sigterm_while_python_ends_does_not_look_like_a_killed_supervisor(slurm, tmp_path):
    """SLURM sends one at once after a requeue, and the batch script would start the supervisor again."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    assert supervise(slurm, tmp_path, "no_such_run", PYTHONPATH=str(tmp_path)).returncode == 2


def supervise(slurm, folder, *words, **variables):
    """Run the program to its end in a folder, as the script of a job of two nodes."""
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_CPUS_PER_TASK": "3"}
    environ = {**os.environ, **slurm.environ, **job, **variables}
    command = [sys.executable, "-m", "hpctrain.supervise", *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_a_script_without_a_run_makes_one_and_finds_it_again_after_a_requeue(slurm, tmp_path):
    slurm.plan(ends("preempted", 14), replace(COMPLETES, start=14))
    words = ("trainer.max_steps=80", "name=mine")
    first = supervise(slurm, tmp_path, *words)
    assert first.returncode == 4, first.stderr
    assert slurm.requeued == ["7"]
    second = supervise(slurm, tmp_path, *words, SLURM_RESTART_COUNT="1")
    assert second.returncode == 0, second.stderr
    directory = RunDirectory.existing(tmp_path / "runs" / "mine" / "job_7")
    assert [entry.reason for entry in Ledger(directory).attempts()] == ["preempted", "completed"]
    config = directory.config.read_text()
    assert ("nodes: 2\n" in config, "cpus_per_process: 3\n" in config) == (True, True)


def test_a_script_with_a_site_file_whose_gpus_are_in_the_gres(slurm, tmp_path):
    slurm.plan(COMPLETES)
    site = tmp_path / "conf" / "cluster" / "mine.yaml"
    site.parent.mkdir(parents=True)
    site.write_text("defaults: [slurm, _self_]\nsbatch: {gres: 'gpu:a100:2,nvme:1'}\n")
    words = ("cluster=mine", "trainer.max_steps=80", "name=mine")
    done = supervise(slurm, tmp_path, *words, SLURM_GPUS_ON_NODE="2")
    assert done.returncode == 0, done.stderr
    cluster = load_run(RunDirectory.existing(tmp_path / "runs" / "mine" / "job_7").config).cluster
    assert (cluster.gpus_per_node, cluster.node_gpus) == (None, 2)
    refused = supervise(slurm, tmp_path, *words, "cluster.gpus_per_node=2", SLURM_GPUS_ON_NODE="2")
    assert (refused.returncode, "to keep the gres" in refused.stderr) == (2, True)


def test_a_script_makes_the_run_of_a_program_from_the_command_after_the_dashes(slurm, tmp_path):
    slurm.plan(ends("completed", 0))
    words = ("args.lr=0.1", "cluster.setup=[module load julia]", "--", "julia", "train.jl", "--lr", "{args.lr}")
    done = supervise(slurm, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    directory = RunDirectory.existing(tmp_path / "runs" / "train" / "job_7")
    config = load_run(directory.config)
    assert isinstance(config, ProgramConfig)
    assert config.run.command == ["julia", "train.jl", "--lr", "{args.lr}"]
    assert (config.nodes, config.cluster.kind, config.cluster.processes_per_node) == (2, "slurm", 1)
    typed = json.loads(directory.manifest.read_text())["command"]
    assert typed == shlex.join(["python", "-m", "hpctrain.supervise", *words])


def test_a_run_is_named_by_its_directory(slurm, supervisor, tmp_path):
    slurm.plan(COMPLETES)
    one = supervisor()
    assert supervise(slurm, tmp_path, "run").returncode == 0
    assert story(one) == [(0, "completed", 80, None)]


STALE = """
import errno, os
from pathlib import Path

real, left = Path.stat, [{times}]


def stat(path, **options):
    if path.name == "config.yaml" and left[0]:
        left[0] -= 1
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    return real(path, **options)


Path.stat = stat
"""


@pytest.mark.parametrize(("restarts", "code", "attempts"), [("0", 1, 0), ("1", 0, 1)])
def test_a_stale_file_handle_is_one_line_or_tried_again_after_a_requeue(
    slurm, supervisor, tmp_path, restarts, code, attempts
):
    slurm.plan(COMPLETES)
    one = supervisor()
    (tmp_path / "sitecustomize.py").write_text(STALE.format(times=1))
    done = supervise(slurm, tmp_path, "run", PYTHONPATH=str(tmp_path), SLURM_RESTART_COUNT=restarts)
    assert (done.returncode, len(story(one))) == (code, attempts), done.stderr
    (line,) = done.stderr.splitlines()[:1]
    assert "the run directory can't be read: [Errno 116] Stale file handle" in line
    assert "Traceback" not in done.stderr


def test_what_is_ignored_is_in_the_log_of_the_batch_script(slurm, supervisor, tmp_path):
    slurm.plan(COMPLETES)
    one = supervisor()
    done = supervise(slurm, tmp_path, str(one.directory.path), SLURM_RESTART_COUNT="twice")
    assert (done.returncode, story(one)[0][1]) == (0, "completed")
    assert "ignoring SLURM_RESTART_COUNT=twice: hpctrain can't parse this, and doesn't need it" in done.stdout


def test_a_job_number_that_can_not_be_parsed_is_named(slurm, supervisor, tmp_path):
    done = supervise(slurm, tmp_path, str(supervisor().directory.path), SLURM_JOB_ID="job-7")
    assert done.returncode == 2
    expected = "expected SLURM_JOB_ID to be a whole number in a batch script (found SLURM_JOB_ID=job-7)"
    assert done.stderr == f"hpctrain: error: {expected}\n"


def test_a_job_that_ends_with_a_bad_configuration_is_not_started_again(slurm, tmp_path):
    """As RequeueExit in slurm.conf, or --requeue=expedite, would have it."""
    assert supervise(slurm, tmp_path, "trainer.max_steps=none").returncode == 2
    assert slurm.updated == ["JobId=7 Requeue=0"]


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["trainer.max_step=80"], {}, "max_step"),
        (
            ["cluster=local"],
            {"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1"},
            "cluster=local: isn't a SLURM cluster",
        ),
        (["no_such_run"], {}, "no_such_run"),
        (["name=mine"], {"SLURM_JOB_ID": ""}, "is for batch scripts"),
        (["a_run"], {"SLURM_JOB_ID": ""}, "is for batch scripts"),
        (["--", "bash", "long.sh"], {"SLURM_JOB_ID": ""}, "hpctrain run cluster=slurm KEY=VALUE ... -- COMMAND"),
        (["nodes=2", "--"], {}, "there is no program to run"),
        (["trainer.max_steps=3", "--", "bash", "long.sh"], {}, "belongs to hpctrain's own training"),
        (["name=mine"], {"SLURM_TASKS_PER_NODE": "2,1"}, "pass --ntasks-per-node to sbatch"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(slurm, tmp_path, words, variables, message):
    done = supervise(slurm, tmp_path, *words, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hpctrain: error: ")
    assert message in line
    assert not slurm.steps
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["attempts.jsonl", "jobs.jsonl"])
def test_an_invalid_record_is_named_in_one_line_at_once(slurm, supervisor, tmp_path, name):
    slurm.plan(KILLED)
    one = supervisor()
    append_json_line(one.directory.path / name, {"attempt": 1, "time": "late"})
    done = supervise(slurm, tmp_path, "run", SLURM_RESTART_COUNT="1")
    errors = [line for line in done.stderr.splitlines() if line.startswith("hpctrain: ")]
    problem = "expected time to be epoch seconds, found 'late'; correct the file, or move it away"
    assert (done.returncode, errors) == (2, [f"hpctrain: error: {one.directory.path / name}: {problem}"])
    assert "Traceback" not in done.stderr
