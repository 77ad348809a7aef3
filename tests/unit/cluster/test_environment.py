from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.environment import NUM_CANDIDATES, Source, derived_ports, is_rank
from hpctrain.errors import ClusterEnvironmentError
from tests.unit.launchers import BATCH, ELASTIC, INTERACTIVE, OPENMPI, PALS, PTY, STEP, TORCH, derive, place


def test_the_variables_that_it_was_derived_from_are_kept_and_no_others() -> None:
    environment = derive(STEP | {"HOME": "/root", "SLURM_MEM_PER_NODE": "3"})
    assert environment.variables.items() <= STEP.items()
    assert {"SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"} <= environment.variables.keys()


@pytest.mark.parametrize("variables", [STEP, ELASTIC, OPENMPI, {}])
def test_it_is_frozen_comparable_and_travels(variables: dict[str, str]) -> None:
    environment = derive(variables)
    assert pickle.loads(pickle.dumps(environment)) == environment
    with pytest.raises(AttributeError):
        environment.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize("variables", [{}, {"MASTER_ADDR": "n1", "MASTER_PORT": "5"}, BATCH, INTERACTIVE, PTY])
def test_single_process(variables: dict[str, str], terminal: dict[str, str]) -> None:
    environment = derive(variables | terminal)
    assert environment.source is Source.SINGLE
    assert place(environment) == (0, 0, 0, 1, 1, 1)
    assert environment.master_addr == "127.0.0.1"
    assert environment.job_id == variables.get("SLURM_JOB_ID")
    assert environment.step_id is None
    assert not is_rank(variables | terminal)


def test_jobs_steps_and_requeues_have_tokens_of_their_own() -> None:
    more = ({}, {"SLURM_JOB_ID": "78"}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"})
    assert len({derive(STEP | change).token for change in more}) == 4


@pytest.mark.parametrize("variables", [TORCH, ELASTIC, OPENMPI])
def test_runs_without_a_job_id_differ_by_their_ports(variables: dict[str, str]) -> None:
    """Their candidates overlap where the first ones are less than five apart."""
    one, other = (derive(variables | {"MASTER_PORT": port}) for port in ("29400", "29401"))
    assert one.token != other.token


@pytest.mark.parametrize(
    ("variables", "another"),
    [
        (TORCH, {"RANK": "2", "LOCAL_RANK": "0"}),
        (ELASTIC, {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}),
        (OPENMPI | {"PMIX_NAMESPACE": "prterun-7"}, {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}),
        (STEP, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}),
    ],
)
def test_all_ranks_of_a_run_have_one_token(variables: dict[str, str], another: dict[str, str]) -> None:
    one, other = derive(variables), derive(variables | another)
    assert one.rank != other.rank
    assert (one.token, one.port_candidates) == (other.token, other.port_candidates)


def test_submitits_executors_start_no_ranks_of_their_own() -> None:
    local = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2"}
    assert derive(local).source is Source.SINGLE
    assert derive(STEP | {"SUBMITIT_EXECUTOR": "slurm"}).source is Source.SLURM


def test_the_configured_port_is_the_only_candidate() -> None:
    for variables in (STEP | {"MASTER_PORT": "4000"}, OPENMPI, {}):
        assert derive(variables, master_port=5000).port_candidates == (5000,)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (STEP | {"RANK": "0"}, "RANK SLURM_PROCID"),
        (STEP | {"WORLD_SIZE": "8"}, "WORLD_SIZE SLURM_STEP_NUM_TASKS"),
        (STEP | {"LOCAL_RANK": "1"}, "LOCAL_RANK SLURM_LOCALID"),
        (STEP | OPENMPI, "OMPI_COMM_WORLD_RANK SLURM_PROCID"),
        (STEP | {"SLURM_PROCID": "5"}, "SLURM_PROCID SLURM_STEP_NUM_TASKS"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "6"}, "SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-4]"}, "SLURM_STEP_NODELIST SLURM_STEP_TASKS_PER_NODE"),
        (STEP | {"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_STEP_NODELIST"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2x"}, "SLURM_STEP_TASKS_PER_NODE"),
        (STEP | {"SLURM_NODEID": "3"}, "SLURM_NODEID SLURM_STEP_TASKS_PER_NODE"),
        (STEP | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE"),
        (STEP | {"SLURM_PROCID": "four"}, "SLURM_PROCID"),
        (STEP | {"SLURM_PROCID": "-1"}, "SLURM_PROCID"),
        (STEP | {"SLURM_PROCID": ""}, "SLURM_STEP_ID"),
        (STEP | {"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_ID"),
        (STEP | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR SLURM_STEP_NODELIST"),
        (STEP | {"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR SLURM_STEP_NODELIST"),
        ({"RANK": "0"}, "RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE"),
        (BATCH | {"RANK": "0", "WORLD_SIZE": "2"}, "RANK WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK WORLD_SIZE LOCAL_RANK"),
        ({**ELASTIC, "RANK": ""}, "WORLD_SIZE LOCAL_RANK"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "TORCHELASTIC_RUN_ID"),
        (ELASTIC | {"RANK": "4"}, "RANK WORLD_SIZE"),
        (ELASTIC | {"LOCAL_RANK": "2"}, "LOCAL_RANK LOCAL_WORLD_SIZE"),
        (ELASTIC | {"LOCAL_WORLD_SIZE": "5"}, "WORLD_SIZE LOCAL_WORLD_SIZE"),
        (ELASTIC | {"GROUP_RANK": "2"}, "GROUP_RANK GROUP_WORLD_SIZE"),
        (ELASTIC | {"RANK": "1.0"}, "RANK"),
        (ELASTIC | {"MASTER_PORT": "70000"}, "MASTER_PORT"),
        ({**TORCH, "LOCAL_WORLD_SIZE": ""}, "WORLD_SIZE MASTER_ADDR"),
        (OPENMPI | {"WORLD_SIZE": "2"}, "WORLD_SIZE OMPI_COMM_WORLD_SIZE"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "5"}, "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "7"}, "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE"),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_SIZE"),
        ({**OPENMPI, "MASTER_ADDR": ""}, "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE"),
        (OPENMPI | {"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR OMPI_COMM_WORLD_SIZE"),
        ({**PALS, "PMI_SIZE": ""}, "PALS_RANKID"),
    ],
)
def test_contradictions_name_the_variables_their_values_and_a_way_out(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ClusterEnvironmentError) as caught:
        derive(variables)
    message = str(caught.value)
    for name in named.split():
        assert caught.value.variables[name] == variables[name]
        assert f"{name}={variables[name]}" in message
    assert any(way in message for way in ("unset ", "set ", "use ", "pass ", "correct ")), message


jobs = st.integers(0, 2**32)
places = st.tuples(st.integers(0, 150), st.integers(0, 9), st.integers(0, 14))


@given(jobs, st.integers(0, 10**6), st.integers(0, 10**6))
def test_derived_ports_are_distinct_and_neither_privileged_nor_ephemeral(job: int, step: int, restart: int) -> None:
    ports = derived_ports(job=job, step=step, restart=restart)
    assert len(ports) == len(set(ports)) == NUM_CANDIDATES
    assert all(1024 <= port < 32_768 for port in ports)


@given(jobs, places, places)
def test_nearby_jobs_steps_and_restarts_never_share_a_port(
    job: int, one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    def first(place: tuple[int, int, int]) -> int:
        return derived_ports(job=job + place[0], step=place[1], restart=place[2])[0]

    assert (first(one) == first(other)) == (one == other)


@given(jobs, st.integers(1, 22_750))
def test_each_coordinate_alone_differs_far_out(job: int, distance: int) -> None:
    here = derived_ports(job=job)[0]
    assert derived_ports(job=job + distance)[0] != here
    assert derived_ports(job=job, step=distance)[0] != here
    assert derived_ports(job=job, restart=distance)[0] != here
