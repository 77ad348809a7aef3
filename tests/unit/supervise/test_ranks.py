import os

import pytest

from hpctrain.config.resources import resources_of
from hpctrain.launch.prepare import RunPlan
from hpctrain.run.directory import RunDirectory
from hpctrain.supervise.ranks import Step, srun_environ

KILLED = """\
srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T10:58:40 ***
srun: error: n1: task 0: Exited with exit code 1
srun: Force Terminated StepId=7.0
"""
MISSPELT = "srun: unrecognized option '--nonsense'\nTry \"srun --help\" for more information\n"


def run(text, code):
    command = ["sh", "-c", 'printf %s "$TEXT" >&2; exit $CODE']
    step = Step(command, {**os.environ, "TEXT": text, "CODE": str(code)})
    assert "".join(step.run()) == text
    return step


def test_what_srun_prints_about_its_tasks_is_kept_and_passed_on(capfd):
    step = run(KILLED, 137)
    assert step.code == 137
    assert step.complaints[0] == "n2: task 1: Killed"
    assert "n1: task 0: Exited with exit code 1" in step.complaints
    assert not any("Terminat" in line for line in step.complaints)
    assert capfd.readouterr().err == KILLED


def test_the_nodes_of_failed_ranks_are_those_that_srun_names():
    ended = "srun: error: n3: tasks 0-1,4: Killed\nsrun: error: rack-2: task 7: Bus error\n"
    several = "srun: error: n[1-2]: tasks 2-3,5-6: Exited with exit code 1\n"
    assert run(ended + several, 137).nodes == {0: "n3", 1: "n3", 4: "n3", 7: "rack-2"}


@pytest.mark.parametrize(
    ("args", "dropped"),
    [
        (["--gres=gpu:1"], True),
        (["--gres", "tmp:1,gpu:a100:2"], True),
        (["--gpus-per-task=1"], True),
        (["--gpus=2"], True),
        (["--cpu-bind=cores", "-G2"], True),
        (["--tres-per-task=gres/gpu:1"], True),
        (["--gres=tmp:1"], False),
        (["--gpu-bind=none"], False),
        (["--tres-per-task=cpu=2"], False),
    ],
)
def test_the_number_of_gpus_of_the_job_is_dropped_if_the_step_asks_for_gpus(composer, tmp_path, args, dropped):
    """SLURM refuses some of both together, and srun reads the job's from a variable."""
    config = composer.compose(["cluster=slurm", f"cluster.srun_args={args}", f"run_dir={tmp_path}"])
    plan = RunPlan(config, RunDirectory.at(tmp_path), resources_of(config))
    environ = {"SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2"}
    assert srun_environ(plan, environ).keys() == environ.keys() - ({"SLURM_GPUS_PER_NODE"} if dropped else set())


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_GPUS_PER_TASK": "a100:1"},
        {"SLURM_TRES_PER_TASK": "gres/gpu:a100=1", "SLURM_TRES_BIND": "gres/gpu:per_task:1"},
    ],
)
def test_a_rank_sees_all_gpus_of_its_node_though_the_job_asked_for_gpus_per_task(composer, tmp_path, variables):
    config = composer.compose(["cluster=slurm", f"run_dir={tmp_path}"])
    plan = RunPlan(config, RunDirectory.at(tmp_path), resources_of(config))
    others = {"SLURM_GPUS_ON_NODE": "2"}
    assert srun_environ(plan, {**others, **variables}) == others
    unrelated = {"SLURM_TRES_PER_TASK": "cpu=4", "SLURM_TRES_BIND": "gres/gpu:closest"}
    assert srun_environ(plan, unrelated) == unrelated


def test_why_srun_started_nothing_is_kept():
    assert run(MISSPELT, 255).complaints == ["unrecognized option '--nonsense'"]
