"""What the batch script does for a program's run: the srun line, the port, the deadline; and how its attempts end."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import replace

import pytest

from hpctrain.cluster.environment import derived_ports
from hpctrain.config.compose import ProgramComposer
from hpctrain.errors import ExitCode
from hpctrain.launch.prepare import plan, prepare
from hpctrain.launch.submission import sbatch_parameters
from hpctrain.run.job_records import JobRecords
from hpctrain.scheduler.slurm import Slurm
from hpctrain.supervise.job import CurrentJob
from hpctrain.supervise.ranks import program_variables, srun_command
from hpctrain.supervise.supervisor import Supervisor
from tests.unit.fakes import Step, exit_record
from tests.unit.supervising import RUNNING, all_ranks, ends, story

COMPLETES_WITHOUT_STEPS = ends("completed", 0)


@pytest.fixture(scope="session")
def program_composer():
    return ProgramComposer(["bash", "long.sh"])


@pytest.fixture
def planned(program_composer, tmp_path):
    """Plans a program's run."""

    def make(*words: str):
        return plan(program_composer.compose_run(["cluster=slurm", f"run_dir={tmp_path}/run", *words]))

    return make


@pytest.fixture
def supervised(program_composer, slurm, tmp_path):
    """Makes a supervisor of a program's run on two nodes."""

    def make(*words: str) -> Supervisor:
        config = program_composer.compose_run(["cluster=slurm", "nodes=2", f"run_dir={tmp_path}/run", *words])
        made = prepare(config, words)
        JobRecords(made.directory).add({"job_id": "7", "time": time.time(), "log": "batch_7.log"})
        return Supervisor(made, slurm.environ, Slurm(slurm.environ, run=slurm.run))

    return make


def test_srun_starts_ranks_of_a_program_and_waits_for_all_of_them(planned):
    command = srun_command(planned("nodes=2", "cluster.processes_per_node=3"))
    assert command[-3:-1] == ["-m", "hpctrain.program"]
    assert "--wait=0" in command
    assert {"--nodes=2", "--ntasks=6", "--ntasks-per-node=3"} <= set(command)


def test_with_one_process_per_node_it_has_the_whole_node(planned):
    run = planned(
        "nodes=2",
        "run.processes=node",
        "cluster.gpus_per_node=4",
        "cluster.cpus_per_process=6",
    )
    command = srun_command(run)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=24"} <= set(command)
    request = sbatch_parameters(run, "log")
    assert {name: request[name] for name in ("nodes", "ntasks_per_node", "cpus_per_task")} == {
        "nodes": 2,
        "ntasks_per_node": 1,
        "cpus_per_task": 24,
    }
    assert request["additional_parameters"]["gpus-per-node"] == "4"


def variables_of(run, slurm, num_attempts_here=1, **job):
    environ = slurm.environ | job
    return program_variables(CurrentJob(run, Slurm(environ, run=slurm.run), environ), environ, num_attempts_here)


def test_the_port_is_the_first_one_that_is_free_here(planned, slurm):
    ports = derived_ports(job=7, step=2, restart=1)
    with socket.create_server(("", ports[0])):
        found = variables_of(planned(), slurm, num_attempts_here=2, SLURM_RESTART_COUNT="1")
    assert int(found["MASTER_PORT"]) in ports[1:]


def test_the_port_of_the_user_is_used_whoever_has_it(planned, slurm):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        assert variables_of(planned(f"cluster.master_port={port}"), slurm)["MASTER_PORT"] == str(port)


def test_the_deadline_is_the_end_of_the_job(planned, slurm):
    end = re.search(r" EndTime=(\d+)", RUNNING)[1]
    assert variables_of(planned(), slurm)["HPCTRAIN_DEADLINE"] == end


def test_without_an_answer_of_slurm_there_is_no_deadline(planned, slurm):
    slurm.fall_silent("scontrol")
    assert "HPCTRAIN_DEADLINE" not in variables_of(planned(), slurm)
    slurm.fall_silent("scontrol", 0)
    slurm.job(re.sub(r" EndTime=\d+", " EndTime=Unknown", RUNNING))
    assert "HPCTRAIN_DEADLINE" not in variables_of(planned(), slurm)


STOPPED = ends("interrupted", 0, exits=all_ranks("interrupted", 0, stop_signal=12))


def test_a_stop_before_the_time_limit_leads_to_the_queue_until_the_program_exits_with_0(slurm, supervised, caplog):
    slurm.plan(STOPPED)
    one = supervised()
    assert one.run() == ExitCode.INTERRUPTED
    assert story(one) == [(0, "time_limit", 0, "requeue")]
    assert slurm.requeued == ["7"]
    assert caplog.text.count("shows how a program reports it") == 1
    assert not list(one.directory.claims.rglob("secret*"))


def test_a_signal_that_slurm_does_not_explain_means_new_ranks_and_one_warning(slurm, supervised, caplog):
    unexplained = replace(STOPPED, exits=all_ranks("interrupted", 0, stop_signal=15))
    slurm.plan(unexplained, unexplained, COMPLETES_WITHOUT_STEPS)
    one = supervised()
    assert one.run() == ExitCode.FINISHED
    assert [end for _, end, *_ in story(one)] == ["interrupted", "interrupted", "completed"]
    assert caplog.text.count("shows how a program reports it") == 1
    assert not slurm.requeued


def test_a_rank_that_was_killed_is_restarted_although_the_other_one_stopped(slurm, supervised):
    killed = Step(start=0, exits=[exit_record(0, "interrupted", 0, stop_signal=15)], exit_code=137)
    slurm.plan(killed, COMPLETES_WITHOUT_STEPS)
    one = supervised()
    assert one.run() == ExitCode.FINISHED
    assert [(end, follows) for _, end, _, follows in story(one)] == [
        ("infrastructure", "restart"),
        ("completed", None),
    ]
