from __future__ import annotations

import pytest

from hpctrain.cluster.environment import Source, is_rank
from hpctrain.errors import ClusterEnvironmentError
from tests.unit.launchers import BATCH, ELASTIC, INTERACTIVE, PTY, STEP, TORCH, derive, place


@pytest.mark.parametrize("around", [{}, BATCH, STEP, INTERACTIVE, PTY])
def test_torchrun_wins_over_the_slurm_around_it(around: dict[str, str], terminal: dict[str, str]) -> None:
    environment = derive(around | terminal | ELASTIC)
    assert environment.source is Source.TORCHRUN
    assert place(environment) == (3, 1, 1, 4, 2, 2)
    assert (environment.master_addr, environment.port_candidates) == ("n1", (29400,))
    assert environment.job_id == around.get("SLURM_JOB_ID")
    assert is_rank(around | terminal | ELASTIC)


@pytest.mark.parametrize("port", ["0", "65536", "ssh"])
def test_the_port_that_torchrun_serves_is_needed(port: str) -> None:
    with pytest.raises(ClusterEnvironmentError, match="expected MASTER_PORT to be a port from 1 to 65535"):
        derive(ELASTIC | {"MASTER_PORT": port})


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
def test_ranks_of_a_local_launcher_in_a_shell_of_an_allocation(
    around: dict[str, str], terminal: dict[str, str]
) -> None:
    assert place(derive(around | terminal | TORCH)) == (3, 1, 1, 4, 2, 2)


def test_a_port_that_torchrun_does_not_serve_is_refused() -> None:
    assert derive(ELASTIC, master_port=29400).master_port == 29400
    with pytest.raises(ClusterEnvironmentError, match=r"29500.*MASTER_PORT=29400"):
        derive(ELASTIC, master_port=29500)
