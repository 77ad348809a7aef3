import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.environment import ClusterEnvironment, Source, is_rank
from hpctrain.cluster.port import derived
from hpctrain.errors import ClusterEnvironmentError

derive = ClusterEnvironment.from_environment

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_NTASKS": "5",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"}
INTERACTIVE = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}
PTY = STEP | {"SLURM_PTY_PORT": "4711"}
TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}
ELASTIC = TORCH | {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "MASTER_ADDR": "n1",
}


def place(environment: ClusterEnvironment) -> tuple[int, ...]:
    """Rank, local rank, node rank; world size, local world size, nodes."""
    ranks = (environment.rank, environment.local_rank, environment.node_rank)
    return (*ranks, environment.world_size, environment.local_world_size, environment.num_nodes)


def test_slurm_step_with_uneven_tasks() -> None:
    environment = derive(STEP)
    assert environment.source is Source.SLURM
    assert place(environment) == (4, 0, 2, 5, 1, 3)
    assert (environment.master_addr, environment.nodes) == ("n1", ("n1", "n2", "n3"))
    assert environment.port_candidates == derived(job=77)
    assert environment.master_port == environment.port_candidates[0]
    assert (environment.job_id, environment.step_id) == ("77", "0")
    assert (environment.array_task, environment.restart_count) == (None, 0)


def test_slurm_local_world_size_is_that_of_the_own_node() -> None:
    assert place(derive(STEP | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"})) == (3, 1, 1, 5, 2, 3)


def test_array_task_and_restart() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    environment = derive(STEP | array)
    assert (environment.job_id, environment.array_task, environment.restart_count) == ("70_3", 3, 2)
    assert environment.port_candidates == derived(job=77, restart=2)


def test_the_variables_that_it_was_derived_from_are_kept_and_no_others() -> None:
    environment = derive(STEP | {"HOME": "/root", "SLURM_CPUS_ON_NODE": "3"})
    assert environment.variables.items() <= STEP.items()
    assert {"SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"} <= environment.variables.keys()


@pytest.mark.parametrize("variables", [STEP, ELASTIC, OPENMPI, {}])
def test_it_is_frozen_comparable_and_travels(variables: dict[str, str]) -> None:
    environment = derive(variables)
    assert pickle.loads(pickle.dumps(environment)) == environment
    with pytest.raises(AttributeError):
        environment.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize("variables", [{}, {"MASTER_ADDR": "n1", "MASTER_PORT": "5"}, BATCH, INTERACTIVE, PTY])
def test_single_process(variables: dict[str, str]) -> None:
    environment = derive(variables)
    assert environment.source is Source.SINGLE
    assert place(environment) == (0, 0, 0, 1, 1, 1)
    assert environment.master_addr == "127.0.0.1"
    assert environment.job_id == variables.get("SLURM_JOB_ID")
    assert environment.step_id is None
    assert not is_rank(variables)


def test_a_step_started_from_a_shell_on_a_terminal_is_no_shell() -> None:
    """As captured in `salloc` with an interactive step, then `srun -n5`, on SLURM 22.05."""
    step = PTY | {"SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "3,1"}
    assert is_rank(step)
    assert place(derive(step)) == (4, 0, 2, 5, 1, 3)


def test_the_batch_script_knows_its_node() -> None:
    assert derive(BATCH).nodes == ("n1",)


@pytest.mark.parametrize("around", [{}, BATCH, STEP, INTERACTIVE, PTY])
def test_torchrun_wins_over_the_slurm_around_it(around: dict[str, str]) -> None:
    environment = derive(around | ELASTIC)
    assert environment.source is Source.TORCHRUN
    assert place(environment) == (3, 1, 1, 4, 2, 2)
    assert (environment.master_addr, environment.port_candidates) == ("n1", (29400,))
    assert environment.job_id == around.get("SLURM_JOB_ID")
    assert is_rank(around | ELASTIC)


def test_torchrun_restarts_count_outside_slurm() -> None:
    assert derive(ELASTIC | {"TORCHELASTIC_RESTART_COUNT": "2"}).restart_count == 2
    assert derive(BATCH | ELASTIC | {"TORCHELASTIC_RESTART_COUNT": "2"}).restart_count == 0


@pytest.mark.parametrize("around", [{}, BATCH, STEP])
def test_ranks_that_torchrun_restarted_have_a_token_that_all_nodes_agree_on(around: dict[str, str]) -> None:
    first, again = (derive(around | ELASTIC | {"TORCHELASTIC_RESTART_COUNT": count}) for count in "01")
    assert first.token == again.token, "the agent of another node counts its own restarts"
    one_node = (
        around | ELASTIC | {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    )
    first, again = (derive(one_node | {"TORCHELASTIC_RESTART_COUNT": count}) for count in "01")
    assert first.token != again.token


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
        (STEP | {"SLURM_STEP_RESV_PORTS": "12000-12003"}, {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}),
    ],
)
def test_all_ranks_of_a_run_have_one_token(variables: dict[str, str], another: dict[str, str]) -> None:
    one, other = derive(variables), derive(variables | another)
    assert one.rank != other.rank
    assert (one.token, one.port_candidates) == (other.token, other.port_candidates)


def test_torchrun_under_slurm_knows_the_nodes() -> None:
    job = BATCH | {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert derive(job | ELASTIC).nodes == ("n1", "n2")
    assert derive(job | ELASTIC | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}).nodes == ()


def test_torchruns_variables_without_torchrun() -> None:
    environment = derive(TORCH)
    assert (environment.source, place(environment)) == (Source.TORCHRUN, (3, 1, 1, 4, 2, 2))
    local = {**TORCH, "MASTER_ADDR": "localhost", "LOCAL_RANK": "3"}
    del local["LOCAL_WORLD_SIZE"]
    assert place(derive(local)) == (3, 3, 0, 4, 4, 1)


@pytest.mark.parametrize("around", [BATCH, INTERACTIVE, PTY])
def test_ranks_of_a_local_launcher_in_a_shell_of_an_allocation(around: dict[str, str]) -> None:
    assert place(derive(around | TORCH)) == (3, 1, 1, 4, 2, 2)


def test_a_step_whose_script_exports_torchs_variables_too() -> None:
    same = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "MASTER_ADDR": "n1-ib", "MASTER_PORT": "12345"}
    environment = derive(STEP | same)
    assert (environment.source, place(environment)) == (Source.SLURM, (4, 0, 2, 5, 1, 3))
    assert (environment.master_addr, environment.port_candidates) == ("n1-ib", (12345,))


def test_submitits_executors_start_no_ranks_of_their_own() -> None:
    local = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "2"}
    assert derive(local).source is Source.SINGLE
    assert derive(STEP | {"SUBMITIT_EXECUTOR": "slurm"}).source is Source.SLURM


def test_openmpi() -> None:
    environment = derive(OPENMPI)
    assert (environment.source, place(environment)) == (Source.OPENMPI, (5, 2, 1, 6, 3, 2))
    assert environment.master_addr == "n1"


def test_openmpi_by_node() -> None:
    by_node = OPENMPI | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert place(derive(by_node)) == (3, 1, 1, 6, 3, 2)


def test_openmpi_on_one_node_needs_no_address_and_keeps_apart_from_another() -> None:
    local = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "6", "MASTER_ADDR": ""}
    one, other = (derive(local | {"PMIX_NAMESPACE": name}) for name in ("a", "b"))
    assert one.master_addr == "127.0.0.1"
    assert one.master_port != other.master_port


def test_openmpi_inside_slurm_takes_the_first_node() -> None:
    daemons = STEP | {
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    environment = derive(daemons | OPENMPI | {"MASTER_ADDR": ""})
    assert (environment.master_addr, place(environment)) == ("n1", (5, 2, 1, 6, 3, 2))


def test_reserved_ports_are_the_only_candidates() -> None:
    environment = derive(STEP | {"SLURM_STEP_RESV_PORTS": "12000-12003"})
    assert environment.port_candidates == (12000, 12001, 12002, 12003)


def test_the_configured_port_is_the_only_candidate() -> None:
    reserved = {"SLURM_STEP_RESV_PORTS": "12000-12003", "MASTER_PORT": "4000"}
    for variables in (STEP | reserved, OPENMPI, {}):
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
        (STEP | {"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID"),
        (STEP | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR SLURM_STEP_NODELIST"),
        (STEP | {"MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR SLURM_STEP_NODELIST"),
        (STEP | {"MASTER_PORT": "70000"}, "MASTER_PORT"),
        (STEP | {"MASTER_PORT": "0"}, "MASTER_PORT"),
        (STEP | {"SLURM_STEP_RESV_PORTS": "x"}, "SLURM_STEP_RESV_PORTS"),
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
        ({**TORCH, "LOCAL_WORLD_SIZE": ""}, "WORLD_SIZE MASTER_ADDR"),
        (OPENMPI | {"WORLD_SIZE": "2"}, "WORLD_SIZE OMPI_COMM_WORLD_SIZE"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "5"}, "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "7"}, "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE"),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_SIZE"),
        ({**OPENMPI, "MASTER_ADDR": ""}, "OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI_RANK PMI_SIZE"),
    ],
)
def test_contradictions_name_the_variables_their_values_and_a_way_out(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ClusterEnvironmentError) as caught:
        derive(variables)
    message = str(caught.value)
    for name in named.split():
        assert caught.value.variables[name] == variables[name]
        assert f"{name}={variables[name]}" in message
    assert any(way in message for way in ("unset ", "set ", "use ", "pass ")), message


def test_a_port_that_torchrun_does_not_serve_is_refused() -> None:
    assert derive(ELASTIC, master_port=29400).master_port == 29400
    with pytest.raises(ClusterEnvironmentError, match=r"29500.*MASTER_PORT=29400"):
        derive(ELASTIC, master_port=29500)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_rank_of_a_block_distributed_step_derives_the_same_world(counts: list[int]) -> None:
    seen = []
    for node, count in enumerate(counts):
        for local in range(count):
            step = STEP | {
                "SLURM_PROCID": str(len(seen)),
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
                "SLURM_STEP_NUM_TASKS": str(sum(counts)),
                "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
                "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
            }
            seen.append(derive(step))
    assert [environment.rank for environment in seen] == list(range(sum(counts)))
    assert all(environment.local_world_size == counts[environment.node_rank] for environment in seen)
    assert len({(e.world_size, e.num_nodes, e.master_addr, e.port_candidates, e.nodes) for e in seen}) == 1
