import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.cluster.nodelist import expand, tasks_per_node
from hpctrain.errors import ClusterEnvironmentError


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
    assert expand(nodelist) == names.split()


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
        expand(nodelist, variable="SLURM_STEP_NODELIST")
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
    assert [expand(example) for example in examples] == answers


@given(st.lists(st.text("abc-.", min_size=1), min_size=1))
def test_plain_names_stand_for_themselves(names: list[str]) -> None:
    assert expand(",".join(names)) == names


@given(st.text("n1-[],.x", max_size=12))
def test_any_text_expands_or_is_refused(text: str) -> None:
    try:
        names = expand(text)
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
