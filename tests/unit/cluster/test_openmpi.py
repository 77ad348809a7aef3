from __future__ import annotations

from launchers import OPENMPI, STEP, derive, place

from hpctrain.cluster.environment import Source


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
