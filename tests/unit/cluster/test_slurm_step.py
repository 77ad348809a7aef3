from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.cluster.environment import ClusterEnvironment, Source, derived_ports, is_rank
from hpctrain.cluster.slurm_step import expand_nodelist, tasks_per_node
from hpctrain.errors import ClusterEnvironmentError
from tests.unit.launchers import BATCH, OPENMPI, PTY, STEP, derive, place


def test_slurm_step_with_uneven_tasks() -> None:
    environment = derive(STEP)
    assert environment.source is Source.SLURM
    assert place(environment) == (4, 0, 2, 5, 1, 3)
    assert (environment.master_addr, environment.nodes) == ("n1", ("n1", "n2", "n3"))
    assert environment.port_candidates == derived_ports(job=77)
    assert environment.master_port == environment.port_candidates[0]
    assert (environment.job_id, environment.step_id) == ("77", "0")
    assert (environment.array_task, environment.restart_count) == (None, 0)


def test_slurm_local_world_size_is_that_of_the_own_node() -> None:
    assert place(derive(STEP | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"})) == (3, 1, 1, 5, 2, 3)


def test_array_task_and_restart() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    environment = derive(STEP | array)
    assert (environment.job_id, environment.array_task, environment.restart_count) == ("70_3", 3, 2)
    assert environment.port_candidates == derived_ports(job=77, restart=2)


def test_a_step_started_from_a_shell_on_a_terminal_is_no_shell(no_terminal: dict[str, str]) -> None:
    """The step's tasks have the variable of the shell, but no terminal."""
    step = PTY | no_terminal
    assert is_rank(step)
    assert place(derive(step)) == (4, 0, 2, 5, 1, 3)


def test_a_batch_script_that_was_submitted_from_a_shell_on_a_terminal_is_no_rank(batch_script: dict[str, str]) -> None:
    """sbatch passes the variables of the shell on, among them the number of its step."""
    assert not is_rank(PTY | batch_script)


def test_without_the_tasks_process_it_is_no_shell() -> None:
    """In a container that numbers its processes; several processes that each train alone would be worse."""
    assert is_rank(PTY)
    assert is_rank(PTY | {"SLURM_TASK_PID": str(2**22 + 1)})


def test_the_batch_script_knows_its_node() -> None:
    assert derive(BATCH).nodes == ("n1",)


def test_a_step_whose_script_exports_torchs_variables_too() -> None:
    same = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "MASTER_ADDR": "n1-ib", "MASTER_PORT": "12345"}
    environment = derive(STEP | same)
    assert (environment.source, place(environment)) == (Source.SLURM, (4, 0, 2, 5, 1, 3))
    assert (environment.master_addr, environment.port_candidates) == ("n1-ib", (12345,))


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


# what SLURM 26.05.5 set on four nodes, of which n3 and n4 are on the first switch: rank, node id, local id
TOPOLOGY = [(0, 2, 0), (1, 2, 1), (2, 3, 0), (3, 3, 1), (4, 0, 0), (5, 0, 1), (6, 1, 0), (7, 1, 1)]
BY_SWITCH = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}


def by_switch(rank: int, node: int, local: int, **more: str) -> ClusterEnvironment:
    ids = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
    return derive(STEP | BY_SWITCH | ids | {"SLURMD_NODENAME": f"n{node + 1}"} | more)


def test_in_the_order_of_switches_rank_zero_may_be_on_any_node() -> None:
    ranks = [by_switch(*ids) for ids in TOPOLOGY]
    assert [environment.node_name for environment in ranks] == ["n3", "n3", "n4", "n4", "n1", "n1", "n2", "n2"]
    # the ranks on its own node know it, and the others try all nodes
    assert [environment.address_candidates for environment in ranks[:2]] == [("n3",)] * 2
    assert {environment.address_candidates for environment in ranks[2:]} == {("n1", "n2", "n3", "n4")}
    assert len({environment.token for environment in ranks}) == 1


def test_a_given_address_of_rank_zero_is_the_only_one() -> None:
    assert {by_switch(*ids, MASTER_ADDR="n3-ib").address_candidates for ids in TOPOLOGY} == {("n3-ib",)}


NEW = {"SLURM_JOB_SLUID": "s7FDM8C2BBZ100"}
SWITCHES = {"SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}


@pytest.mark.parametrize(
    ("change", "is_certain"),
    [
        ({}, True),
        ({"SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, True),
        (SWITCHES, False),
        (SWITCHES | {"SLURM_DISTRIBUTION": "block"}, False),
        (SWITCHES | NEW | {"SLURM_DISTRIBUTION": "cyclic"}, True),
        (SWITCHES | NEW | {"SLURM_DISTRIBUTION": "plane"}, True),
        # a partition may have a topology of its own
        (NEW | {"SLURM_TOPOLOGY_ADDR_PATTERN": "node", "SLURM_DISTRIBUTION": "block"}, False),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, False),
    ],
)
def test_rank_zero_is_on_the_first_node_unless_tasks_may_follow_switches(
    change: dict[str, str], is_certain: bool
) -> None:
    environment = derive(STEP | change)
    assert environment.address_candidates == (("n1",) if is_certain else ("n1", "n2", "n3"))
    assert environment.master_addr == "n1"


def test_a_node_without_slurmd_nodename_is_named_by_the_list() -> None:
    assert derive(STEP).node_name == "n3"
    assert derive(OPENMPI | {"SLURMD_NODENAME": "n1"}).node_name is None  # mpirun may pass on that of another node


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", "n1"),
        ("a,b", "a b"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-10]", "n08 n09 n10"),
        ("n[000-002,7]", "n000 n001 n002 n7"),
        ("n[3,1-2]", "n3 n1 n2"),
        ("rack[01-02]n[1-2]", "rack01n1 rack01n2 rack02n1 rack02n2"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("a[1-2].x.org,b-[3,05],c", "a1.x.org a2.x.org b-3 b-05 c"),
        ("[1-2]", "1 2"),
        ("a[1-2],a[2-3]", "a1 a2 a2 a3"),
        ("n[999-1001]", "n999 n1000 n1001"),
    ],
)
def test_expands(nodelist: str, names: str) -> None:
    assert expand_nodelist(nodelist) == names.split()


@pytest.mark.parametrize(
    "nodelist",
    [
        *("", ",", "a,,b", "a,", "n[", "n]", "n[1", "n1]", "n[]", "n[1-]", "n[-1]", "n[a-b]", "n[2-1]", "n[1-2-3]"),
        *("n[[1]]", "n[1,]", "a b", "a;b", "n[\u0663]", "n[1 - 2]"),
        *("n[1-70000]", "n[1-300][1-300]", "n[1-40000],m[1-40000]"),
    ],
)
def test_refuses_what_is_malformed_and_shows_it(nodelist: str) -> None:
    with pytest.raises(ClusterEnvironmentError) as caught:
        expand_nodelist(nodelist, variable="SLURM_STEP_NODELIST")
    assert caught.value.variables == {"SLURM_STEP_NODELIST": nodelist}
    assert "SLURM_STEP_NODELIST" in str(caught.value)


ranges = st.tuples(st.integers(0, 120), st.integers(0, 6), st.integers(1, 4)).map(
    lambda r: f"{r[0]:0{r[2]}d}" if r[1] == 0 else f"{r[0]:0{r[2]}d}-{r[0] + r[1]}"
)
brackets = st.lists(ranges, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
words = st.sampled_from(["n", "rack", "gpu-", "c.", "x1y", "nid0"])
terms = st.one_of(
    words.map(lambda word: word + "1"),
    st.tuples(words, brackets).map("".join),
    st.tuples(words, brackets, words, brackets).map("".join),
)
nodelists = st.lists(terms, min_size=1, max_size=4).map(",".join)


@pytest.fixture(scope="session")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`scontrol show hostnames` asks no controller, but wants a configuration file."""
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    return path


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="SLURM's commands are not installed")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(nodelists, min_size=30, max_size=30))
def test_agrees_with_scontrol(slurm_conf: Path, examples: list[str]) -> None:
    script = "".join(f"scontrol show hostnames '{example}'; echo --\n" for example in examples)
    environ = {"PATH": "/usr/bin:/bin", "SLURM_CONF": str(slurm_conf)}
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=environ, timeout=60)
    assert shell.stderr == ""
    answers = [answer.split() for answer in shell.stdout.split("--\n")[:-1]]
    assert [expand_nodelist(example) for example in examples] == answers


@given(st.lists(st.text("abc-.", min_size=1), min_size=1))
def test_plain_names_stand_for_themselves(names: list[str]) -> None:
    assert expand_nodelist(",".join(names)) == names


@given(st.text("n1-[],.x", max_size=12))
def test_any_text_expands_or_is_refused(text: str) -> None:
    try:
        names = expand_nodelist(text)
    except ClusterEnvironmentError:
        return
    assert names
    assert not any(set(name) & set("[],") for name in names)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4(x1)", [4]), ("1,2(x2),3", [1, 2, 2, 3])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50)), min_size=1, max_size=10))
def test_tasks_per_node_reads_every_run_length(pairs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{repeat})" if repeat > 1 else str(count) for count, repeat in pairs)
    assert tasks_per_node(text) == [count for count, repeat in pairs for _ in range(repeat)]


@pytest.mark.parametrize("text", ["", "x", "2x3", "2(x)", "2(3)", "2(x3", "1,,1", "-1", "1 (x2)", "1(x999999999)"])
def test_tasks_per_node_refuses(text: str) -> None:
    with pytest.raises(ClusterEnvironmentError) as caught:
        tasks_per_node(text, variable="SLURM_TASKS_PER_NODE")
    assert caught.value.variables == {"SLURM_TASKS_PER_NODE": text}
