from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.cluster import Local, Slurm
from hpctrain.config.root import ProgramConfig
from hpctrain.config.run import ProgramRun
from hpctrain.program.output import ProgramOutput
from hpctrain.program.rank import ProgramRank, program_variables
from hpctrain.run.code import CodeSnapshot
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim, Ledger

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "MASTER_PORT": "20123",
}
ONE_PER_NODE = STEP | {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


CODE = CodeSnapshot(
    run=RunDirectory(Path("/runs/one")),
    digest="d1",
    folder=Path("/runs/one/code/d1"),
    root=Path("/home/me"),
    place="project",
    commit="95d8f4b",
)


def variables_of(inherited, cluster=None, deadline=None, **run):
    config = ProgramConfig(name="program", nodes=2, cluster=cluster or Slurm(), run=ProgramRun(command=["x"], **run))
    rank = ProgramRank(
        config=config,
        claim=Claim(Ledger(RunDirectory(Path("/runs/one"))), 2),
        environment=ClusterEnvironment.from_environment(inherited),
        session=Path("/tmp/session"),
        output=ProgramOutput(),
        code=CODE,
        deadline=deadline,
    )
    return program_variables(rank, inherited)


def test_the_variables_of_torchrun():
    found = variables_of(STEP | {"HPCTRAIN_CLAIM": "2", "HPCTRAIN_PARENT": "9", "HOME": "/home/me"}, deadline=1.6e9)
    assert (
        found.items()
        >= {
            "RANK": "3",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_RANK": "3",
            "ROLE_WORLD_SIZE": "4",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "20123",
            "TORCHELASTIC_RUN_ID": "7.2",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "HPCTRAIN_RUN_DIR": "/runs/one",
            "HPCTRAIN_ATTEMPT": "2",
            "HPCTRAIN_CHECKPOINT_DIR": "/runs/one/checkpoints",
            "HPCTRAIN_SUBMIT_DIR": "/home/me/project",
            "HPCTRAIN_SESSION": "/tmp/session",
            "HPCTRAIN_DEADLINE": "1600000000",
            "HOME": "/home/me",
            "SLURM_PROCID": "3",
        }.items()
    )
    assert not {"HPCTRAIN_CLAIM", "HPCTRAIN_PARENT", "PET_NNODES", "NODE_RANK"} & found.keys()


def test_the_node_of_rank_zero_is_the_first_for_a_program_that_starts_the_ranks():
    """torchrun listens where its node rank is 0, which has to be the node of MASTER_ADDR."""
    switched = ONE_PER_NODE | {"SLURM_PROCID": "0", "SLURM_NODEID": "1", "SLURM_DISTRIBUTION": "block"}
    found = variables_of(switched | {"SLURM_JOB_SLUID": "s7FDM8C2BBZ100"}, processes="node")
    assert {found[name] for name in ("NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")} == {"0"}
    assert (found["MASTER_ADDR"], found["PET_MASTER_ADDR"]) == ("n2", "n2")


def test_a_program_that_starts_the_ranks_gets_defaults_of_torchruns_options():
    inherited = ONE_PER_NODE | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n1"}
    found = variables_of(inherited, Slurm(processes_per_node=4), processes="node")
    assert (
        found.items()
        >= {
            "NODE_RANK": "1",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "20123",
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "4",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "n1",
            "PET_MASTER_PORT": "20123",
        }.items()
    )
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & found.keys()


@pytest.mark.parametrize(
    ("given", "cluster", "run", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "6"}, Slurm(), {}, "6"),
        ({"SLURM_CPUS_ON_NODE": "8"}, Slurm(), {}, "4"),
        ({"OMP_NUM_THREADS": "3"}, Slurm(cpus_per_process=5), {}, "3"),
        ({}, Slurm(cpus_per_process=5), {}, "5"),
    ],
)
def test_the_threads_of_a_rank(given, cluster, run, threads):
    assert variables_of(STEP | given, cluster, **run)["OMP_NUM_THREADS"] == threads


def test_the_threads_of_ranks_that_a_program_starts():
    asked = Slurm(processes_per_node=4, cpus_per_process=3)
    assert variables_of(ONE_PER_NODE, asked, processes="node")["OMP_NUM_THREADS"] == "3"
    shared = ONE_PER_NODE | {"SLURM_CPUS_PER_TASK": "10"}
    assert variables_of(shared, Slurm(processes_per_node=4), processes="node")["OMP_NUM_THREADS"] == "2"


def test_the_users_own_variables():
    cluster = Slurm(network_interface="ib0", env={"MINE": "1", "NCCL_SOCKET_IFNAME": "ib1"})
    found = variables_of(STEP | {"PYTHONUNBUFFERED": ""}, cluster)
    assert (found["MINE"], found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("1", "ib0", "ib1")
    assert (found["PYTHONUNBUFFERED"], found["PYTHONDONTWRITEBYTECODE"]) == ("", "1")


def test_a_program_in_the_copy_leaves_the_original_alone():
    found = variables_of(STEP | {"PWD": "/elsewhere"})
    assert found["PWD"] == "/runs/one/code/d1/project"
    assert found["UV_NO_SYNC"] == "1"
    assert (found["GIT_CEILING_DIRECTORIES"], found["HPCTRAIN_CODE_COMMIT"]) == ("/runs/one/code", "95d8f4b")
    own = variables_of(STEP | {"GIT_CEILING_DIRECTORIES": "/home", "UV_NO_SYNC": "0"})
    assert (own["GIT_CEILING_DIRECTORIES"], own["UV_NO_SYNC"]) == ("/runs/one/code:/home", "0")


def test_a_rank_of_this_machine():
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = variables_of(alone, Local())
    assert (found["TORCHELASTIC_RUN_ID"], found["GROUP_WORLD_SIZE"]) == ("program.2", "1")
    assert "OMP_NUM_THREADS" not in found
    assert "HPCTRAIN_DEADLINE" not in found
