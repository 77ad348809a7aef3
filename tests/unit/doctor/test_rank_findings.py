"""What the ranks' records and measurements mean."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from hpctrain.doctor.finding import Finding, Severity
from hpctrain.doctor.folder import DoctorJobRecord, RankRecord
from hpctrain.doctor.measurements import RankAnswers, figures, measured_lines
from hpctrain.doctor.rank_findings import rank_findings

NODES = ("n1", "n2", "n3", "n4")
GPU = {
    "index": "0",
    "name": "H100",
    "driver": "550.54",
    "ecc_errors": "0",
    "temperature": "40",
    "hardware_slowdown": "Not Active",
    "thermal_slowdown": "Not Active",
    "power_brake": "Not Active",
}


def pair(first: str, second: str, **values: object) -> dict[str, Any]:
    usual = {"latency_s": 2e-5, "best_latency_s": 1e-5, "bytes_per_s": 1e9, "first_sent": 3000, "second_sent": 3000}
    return {"first": first, "second": second, **usual, **values}


def records(**changes: dict[str, object]) -> dict[int, RankRecord]:
    """A record for each of four ranks on as many nodes; `r2={...}` changes that of rank 2."""
    found = {
        rank: RankRecord(
            node=node,
            stage="done",
            own_address=f"10.0.0.{rank}",
            interfaces=[{"name": "ib0", "address": "10.0.0.9", "mbit_per_s": 0}],
            devices=["cuda:0"],
            flops_per_s=1e12,
            write_bytes_per_s=1e9,
        )
        for rank, node in enumerate(NODES)
    }
    for name, change in changes.items():
        rank = int(name[1:])
        found[rank] = replace(found[rank], **change)  # type: ignore[arg-type]
    return found


def findings(
    known: dict[int, RankRecord] | None = None,
    pairs: list[dict[str, Any]] | None = None,
    *,
    gpus: int = 1,
    interface: str | None = None,
    **job: object,
) -> list[Finding]:
    answers = RankAnswers(
        job=DoctorJobRecord(nodes=NODES, rank_nodes=NODES, **job),  # type: ignore[arg-type]
        records=records() if known is None else known,
        measured={"pairs": [pair(*both) for both in combinations(NODES, 2)] if pairs is None else pairs},
        processes_per_node=1,
        gpus_per_node=gpus,
        interface=interface,
    )
    return list(rank_findings(answers))


def test_nothing_is_found_where_all_is_well() -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("change", "check", "severity", "words"),
    [
        ({"own_address": "127.0.1.1"}, "interface", Severity.ERROR, "resolves to 127.0.1.1"),
        ({"error": "CUDA error", "stage": "measuring its device"}, "ranks", Severity.ERROR, "failed while measuring"),
        ({"stage": "exchanging messages with n1"}, "ranks", Severity.ERROR, "while exchanging messages with n1"),
        ({"devices": ["cpu"]}, "devices", Severity.ERROR, "torch finds no GPU"),
        ({"smi_problem": "driver/library mismatch"}, "gpus", Severity.WARNING, "driver/library mismatch"),
        ({"gpus": [{**GPU, "ecc_errors": "3"}]}, "gpus", Severity.WARNING, "3 uncorrected memory errors"),
        ({"gpus": [{**GPU, "thermal_slowdown": "Active"}]}, "gpus", Severity.WARNING, "thermal slowdown at 40"),
        ({"gpus": [{**GPU, "temperature": "93"}]}, "gpus", Severity.WARNING, "hot at 93"),
        ({"flops_per_s": 4e11}, "speed", Severity.WARNING, "400 GFLOP/s"),
        ({"write_bytes_per_s": 1e8}, "disk", Severity.WARNING, "100 MB/s"),
    ],
)
def test_a_fault_of_one_node_names_it(change: dict[str, object], check: str, severity: Severity, words: str) -> None:
    (found,) = findings(records(r2=change))
    assert (found.check, found.severity, found.nodes) == (check, severity, ("n3",))
    assert words in found.problem


def test_different_drivers_are_named_with_their_nodes() -> None:
    other = {**GPU, "driver": "535.1"}
    (found,) = findings(records(r0={"gpus": [GPU]}, r1={"gpus": [other]}))
    assert "550.54 on n1; 535.1 on n2" in found.problem


def test_a_chosen_interface_makes_the_own_name_irrelevant() -> None:
    known = records(r2={"own_address": "127.0.1.1"})
    assert "cluster.network_interface=ib0" in findings(known)[0].remedy
    assert findings(known, interface="ib0") == []


def test_a_rank_that_never_began_is_named_by_its_place() -> None:
    known = records()
    del known[1]
    found = findings(known, [], complaints={"ranks": ["error: n2: task 1: launch failed"]})
    assert [one.nodes for one in found] == [("n2",)]
    assert "launch failed" in found[0].problem


def test_ranks_with_the_same_error_share_a_finding() -> None:
    error = {"error": "rank zero did not answer", "stage": "looked for the other ranks"}
    (found,) = findings(records(r1=error, r3=error), [])
    assert found.nodes == ("n2", "n4")


def test_on_a_cpu_there_are_no_gpus_to_miss() -> None:
    assert findings(records(r2={"devices": ["cpu"]}), gpus=0) == []


def test_a_node_with_slow_pairs_is_named() -> None:
    pairs = [pair(*both, **({"bytes_per_s": 1e7} if "n2" in both else {})) for both in combinations(NODES, 2)]
    (found,) = findings(pairs=pairs)
    assert (found.check, found.nodes) == ("network", ("n2",))
    assert "10 MB/s" in found.problem
    assert "between the others 1 GB/s" in found.problem


def test_a_pair_that_is_slow_alone_is_named_as_a_pair() -> None:
    pairs = [pair(*both, **({"bytes_per_s": 1e7} if both == ("n1", "n2") else {})) for both in combinations(NODES, 2)]
    (found,) = findings(pairs=pairs)
    assert found.nodes == ("n1", "n2")


def test_packets_that_a_node_loses() -> None:
    lost = {"first_repeated": 60, "bytes_per_s": 1e7}
    pairs = [pair(*both, **(lost if "n4" in both else {})) for both in combinations(NODES, 2)]
    (found,) = findings(pairs=pairs)
    assert found.nodes == ("n4",)
    assert "180 of 18000 TCP segments" in found.problem


def test_a_network_on_which_everything_is_lost_or_slow_is_one_finding() -> None:
    lossy = [pair(*both, first_repeated=60) for both in combinations(NODES, 2)]
    (found,) = findings(pairs=lossy)
    assert found.nodes == NODES
    slow = [pair(*both, bytes_per_s=1e7) for both in combinations(NODES, 2)]
    (found,) = findings(pairs=slow)
    assert found.nodes == NODES
    assert "carries 10 MB/s" in found.problem


def test_of_two_nodes_the_pair_is_compared_with_a_gigabit() -> None:
    (found,) = findings(pairs=[pair("n1", "n2", bytes_per_s=5e6)])
    assert found.nodes == ("n1", "n2")
    assert "with more nodes" in found.remedy


def test_an_own_name_that_is_a_loopback_address_matters_only_where_ranks_did_not_meet() -> None:
    assert findings(records(r2={"own_address": "127.0.1.1"}, r0={"met": True})) == []


def test_a_much_faster_interface_that_was_not_used_is_named() -> None:
    fast = {"interfaces": [{"name": "ib0", "address": "10.0.0.1", "mbit_per_s": 200_000}]}
    slow = [pair(*both, bytes_per_s=1.18e8) for both in combinations(NODES, 2)]
    (found,) = findings(records(r0=fast), slow)
    assert "carries 118 MB/s, but ib0 has 200 Gbit/s" in found.problem
    assert "cluster.network_interface=ib0" in found.remedy
    assert findings(records(r0=fast), slow, interface="eth0") == []
    virtual = {"interfaces": [{"name": "docker0", "address": "172.17.0.1", "mbit_per_s": 10_000}]}
    assert findings(records(r0=virtual), slow) == []


def test_the_log_of_a_rank_that_never_began_is_quoted() -> None:
    known = records()
    del known[3]
    answers = RankAnswers(
        job=DoctorJobRecord(nodes=NODES, rank_nodes=NODES),
        records=known,
        measured={},
        processes_per_node=1,
        gpus_per_node=1,
        interface=None,
        last_line="ImportError: libc10.so",
    )
    assert "ImportError: libc10.so" in next(rank_findings(answers)).problem


def test_figures_and_lines() -> None:
    answers = RankAnswers(
        job=DoctorJobRecord(nodes=NODES, rank_nodes=NODES),
        records=records(),
        measured={
            "pairs": [pair("n1", "n2"), pair("n1", "n3", bytes_per_s=5e8)],
            "reductions": [
                {"backend": "gloo", "bytes": 4, "seconds": 1e-4},
                {"backend": "gloo", "bytes": 1 << 20, "seconds": 0.01},
                {"backend": "gloo", "bytes": 25 << 20, "seconds": 0.1},
            ],
        },
        processes_per_node=1,
        gpus_per_node=0,
        interface=None,
    )
    assert answers.request == "default, 4 nodes, 1 ranks and 0 GPUs per node"
    found = figures(answers)
    assert found["pair_bandwidth"] == 5e8
    assert found["gloo_all_reduce_s"] == 1e-4
    assert found["gloo_all_reduce_bandwidth"] == pytest.approx((25 << 20) / 0.1)
    lines = list(measured_lines(answers, found))
    assert "all-reduce of 4 B over gloo: 100 us" in lines
    assert any("2 pairs of nodes: at least 500 MB/s (n1 and n3)" in line for line in lines)
