from __future__ import annotations

import pytest

from hpctrain.cluster.environment import Source, is_rank
from hpctrain.errors import ClusterEnvironmentError
from tests.unit.launchers import (
    BATCH,
    FLUX,
    HYDRA,
    INTERACTIVE,
    JSRUN,
    MVAPICH,
    OPENMPI,
    PALS,
    PTY,
    STEP,
    TORCH,
    derive,
    place,
)

MVAPICH_3 = {name.replace("MV2", "MVP"): value for name, value in MVAPICH.items()}
LAUNCHERS = {
    "openmpi": (Source.OPENMPI, OPENMPI),
    "flux": (Source.FLUX, FLUX),
    "flux with Cray's PMI": (Source.FLUX, FLUX | PALS),
    "pals": (Source.PALS, PALS),
    "mvapich": (Source.MVAPICH, MVAPICH),
    "mvapich 3": (Source.MVAPICH, MVAPICH_3),
    "jsrun": (Source.JSRUN, JSRUN),
    "hydra": (Source.HYDRA, HYDRA),
}
DAEMONS = STEP | {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"}
PMI2 = {"PMI_RANK": STEP["SLURM_PROCID"], "PMI_SIZE": STEP["SLURM_STEP_NUM_TASKS"], "PMI_JOBID": "77.0"}
PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.77.0"}
CRAY = {"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PALS_NODEID": "0", "PALS_APID": "7"}


def without_address(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name != "MASTER_ADDR"}


@pytest.mark.parametrize(("source", "variables"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_each_launcher_gives_a_place(source: Source, variables: dict[str, str]) -> None:
    environment = derive(variables)
    assert (environment.source, place(environment)) == (source, (5, 2, 1, 6, 3, 2))
    assert environment.master_addr == "n1"
    assert is_rank(variables)


# not with those of PALS, which SLURM's own steps have as well
@pytest.mark.parametrize("name", sorted(LAUNCHERS.keys() - {"pals"}))
def test_inside_slurm_the_first_node_has_rank_zero(name: str) -> None:
    source, variables = LAUNCHERS[name]
    environment = derive(DAEMONS | without_address(variables))
    assert (environment.source, environment.master_addr, place(environment)) == (source, "n1", (5, 2, 1, 6, 3, 2))


@pytest.mark.parametrize("variables", [case for _, case in LAUNCHERS.values()], ids=LAUNCHERS)
def test_several_nodes_need_an_address(variables: dict[str, str]) -> None:
    with pytest.raises(ClusterEnvironmentError, match=r"expected MASTER_ADDR.* pass \w+ .*MASTER_ADDR.HOST"):
        derive(without_address(variables))


def test_by_node() -> None:
    by_node = OPENMPI | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert place(derive(by_node)) == (3, 1, 1, 6, 3, 2)


def test_one_node_needs_no_address_and_keeps_apart_from_another() -> None:
    local = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "6", "MASTER_ADDR": ""}
    one, other = (derive(local | {"PMIX_NAMESPACE": name}) for name in ("a", "b"))
    assert one.master_addr == "127.0.0.1"
    assert one.master_port != other.master_port
    assert place(derive(without_address(FLUX) | {"FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "5"}))[4:] == (6, 1)


@pytest.mark.parametrize("hosts", ["batch1 1 n1 3 n2 3", "n1 3 n2 3"])
def test_lsf_names_the_nodes_of_jsrun(hosts: str) -> None:
    environment = derive(without_address(JSRUN) | {"LSB_MCPU_HOSTS": hosts})
    assert (environment.master_addr, environment.nodes) == ("n1", ("n1", "n2"))


def test_unequal_nodes_are_refused() -> None:
    with pytest.raises(ClusterEnvironmentError, match="the same number of ranks on every node"):
        derive(FLUX | {"FLUX_JOB_SIZE": "7"})


@pytest.mark.parametrize(
    "variables",
    [
        *(
            {name: "1" if "SIZE" in name or "NNODES" in name else "0" for name in case}
            for case in (FLUX, MVAPICH, JSRUN)
        ),
        {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        *(shell | given for shell in (INTERACTIVE, PTY) for given in (PMIX, PMI2, CRAY)),
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "singleton.n1.4711"},
        PMIX | {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        BATCH,
        {"FLUX_URI": "local:///run/flux/local", "FLUX_JOB_TMPDIR": "/tmp"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_a_shell_launches_its_own_ranks(variables: dict[str, str], terminal: dict[str, str]) -> None:
    assert not is_rank({name: value for name, value in variables.items() if name != "MASTER_ADDR"} | terminal)


@pytest.mark.parametrize("given", [PMIX, PMI2, CRAY])
def test_a_step_of_srun_is_slurms_whatever_its_plugin_for_mpi_sets(given: dict[str, str]) -> None:
    assert derive(STEP | given).source is Source.SLURM


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (PMIX, "a PMIx launcher started this process"),
        ({"PMIX_RANK": "3"}, "unset PMIX_RANK"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "found PMI_RANK=1, PMI_SIZE=4"),
        ({"ALPS_APP_PE": "2"}, "aprun"),
        ({"MVP_COMM_WORLD_LOCAL_RANK": "0", "MPISPAWN_GLOBAL_NPROCS": "4"}, "MVAPICH"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "expected LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_processes_whose_place_is_unknown_never_train_alone(variables: dict[str, str], named: str) -> None:
    for ask in (is_rank, derive):
        with pytest.raises(ClusterEnvironmentError, match=named) as caught:
            ask(variables)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variables", [PMIX, {"ALPS_APP_PE": "2"}, CRAY])
def test_torchruns_variables_say_what_such_a_launcher_does_not(variables: dict[str, str]) -> None:
    exported = TORCH | {"RANK": "0", "LOCAL_RANK": "0"}
    assert derive(variables | exported).source is Source.TORCHRUN


def test_exported_variables_must_agree_with_the_launcher() -> None:
    assert derive(FLUX | {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "2"}).rank == 5
    with pytest.raises(ClusterEnvironmentError, match="RANK and FLUX_TASK_RANK"):
        derive(FLUX | {"RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "1"})
