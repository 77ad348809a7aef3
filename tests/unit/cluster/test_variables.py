from __future__ import annotations

import pytest

from hpctrain.cluster import launchers
from hpctrain.cluster.variables import Variables, is_loopback, without_job_variables
from hpctrain.errors import ClusterEnvironmentError


def test_what_is_read_and_set_is_remembered():
    variables = Variables({"RANK": "3", "HOST": " n1 ", "EMPTY": " ", "OTHER": "x"})
    assert (variables.number("RANK"), variables.text("HOST")) == (3, "n1")
    assert (variables.text("EMPTY"), variables.number("EMPTY"), variables.text("ABSENT")) == (None, None, None)
    assert variables.values_read == {"RANK": "3", "HOST": "n1"}


ODD_NUMBERS = ["-1", "1.5", "two", "²", "1 2"]


@pytest.mark.parametrize("value", ODD_NUMBERS)
def test_a_number_of_an_unknown_form_is_none_and_remembered(value):
    variables = Variables({"COUNT": value})
    assert (variables.number("COUNT"), variables.unparsable) == (None, {"COUNT": value})


@pytest.mark.parametrize("value", ODD_NUMBERS)
def test_a_number_that_is_needed_is_a_whole_one_from_0_up(value):
    with pytest.raises(ClusterEnvironmentError, match=r"expected RANK to be a whole number .*\(found RANK=") as caught:
        Variables({"RANK": value}).needed_number("RANK", "SIZE")
    assert caught.value.variables == {"RANK": value}


def test_a_port_is_one():
    assert Variables({"PORT": "65535"}).port("PORT") == 65_535
    assert Variables({}).port("PORT") is None
    for value in ("0", "65536", "ssh"):
        assert Variables({"PORT": value}).port("PORT") is None


@pytest.mark.parametrize(("value", "several"), [("", False), ("0", False), ("1", False), ("2", True), ("1 of 2", True)])
def test_processes_of_an_unknown_number_may_be_several(value, several):
    assert Variables({"SIZE": value}).may_exceed_one("SIZE") is several


@pytest.mark.parametrize("read", ["needed_text", "needed_number"])
def test_a_variable_that_another_one_requires(read):
    assert str(getattr(Variables({"SIZE": "4"}), read)("SIZE", "RANK")) == "4"
    with pytest.raises(ClusterEnvironmentError, match=r"^expected SIZE in addition to RANK; .* \(found RANK=1\)$"):
        getattr(Variables({"RANK": "1"}), read)("SIZE", "RANK")


def test_a_rank_is_below_its_world_size():
    Variables({"RANK": "1", "SIZE": "2"}).require_below("RANK", "SIZE")
    Variables({"RANK": "1"}).require_below("RANK", "SIZE")
    with pytest.raises(ClusterEnvironmentError, match="expected RANK to be below SIZE") as caught:
        Variables({"RANK": "2", "SIZE": "2"}).require_below("RANK", "SIZE")
    assert caught.value.variables == {"RANK": "2", "SIZE": "2"}


def test_two_launchers_agree():
    Variables({"ONE": "2", "OTHER": "2"}).require_equal("ONE", "OTHER")
    Variables({"OTHER": "2"}).require_equal("ONE", "OTHER")
    with pytest.raises(ClusterEnvironmentError, match="expected ONE and OTHER to be equal; unset ONE"):
        Variables({"ONE": "2", "OTHER": "3"}).require_equal("ONE", "OTHER")


def test_addresses_of_the_node_itself():
    assert [is_loopback(address) for address in ("localhost", "::1", "127.0.1.1", "10.0.0.1", "n127.0")] == [
        *(True, True, True),
        *(False, False),
    ]


def test_only_the_allocation_and_the_launchers_go() -> None:
    kept = {
        "PATH": "/bin",
        "HOME": "/root",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JWT": "token",
        "NCCL_SOCKET_IFNAME": "ib0",
        "TORCH_HOME": "/cache",
        "OMP_NUM_THREADS": "4",
        "RANKING": "x",
        "SQUEUE_FORMAT": "%i",
    }
    dropped = [
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME"),
        *("SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "SALLOC_QOS"),
        *("PMI_RANK", "PMI2_X", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_x"),
        *("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "SUBMITIT_EXECUTOR", "SUBMITIT_LOCAL_GLOBALID"),
    ]
    assert without_job_variables(kept | dict.fromkeys(dropped, "1")) == kept


def test_the_given_mapping_is_left_alone() -> None:
    variables = {"SLURM_JOB_ID": "1"}
    assert without_job_variables(variables) == {}
    assert variables == {"SLURM_JOB_ID": "1"}


def test_no_launcher_is_seen_by_a_program_that_is_launched_from_its_ranks() -> None:
    names = {name for launcher in launchers.LAUNCHERS for name in launcher.variables} | {
        *launchers.MARKS,
        *launchers.SIZES,
    }
    assert without_job_variables(dict.fromkeys(names, "2")) == {}
