"""What hpctrain doesn't need may hold anything: newer versions of SLURM and of the launchers use new formats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.cluster import environment as module
from hpctrain.cluster.environment import is_rank
from hpctrain.cluster.launchers import LAUNCHERS, MARKS
from hpctrain.errors import ClusterEnvironmentError
from tests.unit.launchers import (
    BATCH,
    ELASTIC,
    FLUX,
    HYDRA,
    INTERACTIVE,
    JSRUN,
    MVAPICH,
    OPENMPI,
    PALS,
    STEP,
    TORCH,
    derive,
    place,
)

GARBAGE = "<7, in a new form>"
OPTIONAL = {
    "SLURM_RESTART_COUNT": "1",
    "SLURM_ARRAY_JOB_ID": "70",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURMD_NODENAME": "n3",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    "SLURM_DISTRIBUTION": "block",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_TASK_PID": "1",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_CPUS_ON_NODE": "4",
}
ENVIRONMENTS = {
    "slurm": STEP | OPTIONAL,
    "slurm with MASTER_ADDR": STEP | {"MASTER_ADDR": "n1-ib"},
    "torchrun": ELASTIC | {"TORCHELASTIC_RESTART_COUNT": "1"},
    "like torchrun": TORCH,
    "openmpi": OPENMPI,
    "openmpi in a step": OPENMPI | STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2"},
    "flux": FLUX,
    "pals": PALS,
    "mvapich": MVAPICH,
    "jsrun": JSRUN,
    "hydra": HYDRA,
    "batch script": BATCH | OPTIONAL,
    "shell of an allocation": INTERACTIVE,
    "no launcher": {},
}
_STEP = {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"}
_TORCH = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"}
_OPENMPI = {f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
NEEDED = {
    "slurm": _STEP | {"SLURM_STEP_NODELIST"},
    "slurm with MASTER_ADDR": _STEP,
    "torchrun": _TORCH,
    "like torchrun": _TORCH,
    "openmpi": _OPENMPI,
    "openmpi in a step": _OPENMPI,
    "flux": {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"},
    "pals": {"PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"},
    "mvapich": {f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")},
    "jsrun": {f"JSM_NAMESPACE_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")},
    "hydra": {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    # each says that this process may be one of several, whatever it holds
    "batch script": {*MARKS, "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    "shell of an allocation": {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
    "no launcher": {*MARKS, "RANK", "WORLD_SIZE", "LOCAL_RANK"},
}
"""The variables of each launcher that end a run if they can't be read: the place follows from them alone."""


def variables_of_hpctrain() -> list[str]:
    """Every variable that hpctrain/cluster reads."""
    folder = Path(str(module.__file__)).parent
    texts = [path.read_text() for path in folder.glob("*.py") if path.name != "scrub.py"]
    found = {name for text in texts for name in re.findall(r'"([A-Z][A-Z0-9]*_[A-Z0-9_]+|RANK)"', text)}
    return sorted(found.union(*(launcher.variables for launcher in LAUNCHERS)))


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_only_what_a_place_needs_ends_a_run(launcher: str) -> None:
    variables = ENVIRONMENTS[launcher]
    expected = derive(variables)
    names = variables_of_hpctrain()
    assert len(names) > 60
    ended = set()
    for name in names:
        try:
            environment = derive(variables | {name: GARBAGE})
        except ClusterEnvironmentError:
            ended.add(name)
            continue
        assert (environment.source, place(environment)) == (expected.source, place(expected)), name
        assert is_rank(variables | {name: GARBAGE}) is is_rank(variables), name
        # what was read as a number, a list or a port is logged
        if name in expected.variables and expected.variables[name][0].isdigit():
            assert environment.unparsable == {name: GARBAGE}
    # torchrun sets it, and any text is an id
    assert ended - {"TORCHELASTIC_RUN_ID"} == NEEDED[launcher]


def test_processes_of_an_unknown_number_do_not_train_alone() -> None:
    with pytest.raises(ClusterEnvironmentError, match="WORLD_SIZE"):
        is_rank({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "<2>"})


def test_what_is_ignored_is_named_with_its_value() -> None:
    environment = derive(STEP | {"SLURM_STEP_ID": "step-7", "SLURM_RESTART_COUNT": "none"})
    assert (environment.step_id, environment.restart_count) == ("step-7", 0)
    assert environment.ignored_message == (
        "ignoring SLURM_STEP_ID=step-7, SLURM_RESTART_COUNT=none: hpctrain can't parse this, and doesn't need it"
    )
    assert derive(STEP).ignored_message == ""


@pytest.mark.parametrize(("step", "is_one"), [("0", True), ("12", True), ("-4", False), ("-5", False), ("-6", False)])
def test_the_ids_of_steps_as_slurm_26_05_prints_them(step: str, is_one: bool) -> None:
    """-4 is the external step, -5 the batch script, -6 the shell of an allocation."""
    assert is_rank(STEP | {"SLURM_STEP_ID": step}) is is_one
    assert derive(BATCH | {"SLURM_STEP_ID": "-5", "SLURM_STEPID": "-5"}).step_id is None


@pytest.mark.parametrize("names", ["n{1}", "n[1-2]"])
def test_a_step_of_one_node_needs_no_names(names: str) -> None:
    alone = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": names}
    environment = derive(STEP | alone | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"})
    assert (environment.nodes, environment.master_addr) == ((), "127.0.0.1")
