"""Pairs of nodes, each measured once, of which the one with a bad link is named; figures beside those of a baseline."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import pytest

from hpctrain.doctor.folder import from_json
from hpctrain.doctor.measurements import (
    Pair,
    compare_with_baseline,
    nodes_at_fault,
    pair_rounds,
    slow_pairs,
    suspicious_pairs,
)

FAST, SLOW = 1e9, 1e7


def measured(nodes: str, slow: str = "", lossy: str = "") -> list[Pair]:
    """All pairs of nodes of one letter; `slow` and `lossy` name nodes, or pairs by two letters."""

    def is_in(pair: tuple[str, str], named: str) -> bool:
        words = named.split()
        return any(set(word) <= set(pair) for word in words)

    return [
        Pair(
            first=pair[0],
            second=pair[1],
            latency_s=2e-4,
            best_latency_s=1e-4,
            bytes_per_s=SLOW if is_in(pair, slow) else FAST,
            first_sent=1000,
            second_sent=1000,
            first_repeated=50 if is_in(pair, lossy) else 1,
        )
        for pair in combinations(nodes, 2)
    ]


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_comes_once_and_nobody_has_two_partners_in_a_round(count: int) -> None:
    rounds = pair_rounds(count)
    assert sorted(pair for one in rounds for pair in one) == list(combinations(range(count), 2))
    for one in rounds:
        busy = [node for pair in one for node in pair]
        assert len(busy) == len(set(busy))


def test_the_node_is_named_whose_pairs_are_slow() -> None:
    pairs = measured("abcd", slow="c")
    bad = slow_pairs(pairs)
    assert {pair.nodes for pair in bad} == {("a", "c"), ("b", "c"), ("c", "d")}
    assert nodes_at_fault(bad, pairs) == ["c"]


def test_one_slow_pair_is_nobodys_fault() -> None:
    pairs = measured("abcd", slow="ab")
    bad = slow_pairs(pairs)
    assert [pair.nodes for pair in bad] == [("a", "b")]
    assert nodes_at_fault(bad, pairs) == []


def test_two_of_eight_nodes_are_both_named() -> None:
    pairs = measured("abcdefgh", slow="b f")
    assert nodes_at_fault(slow_pairs(pairs), pairs) == ["b", "f"]


def test_where_all_pairs_lose_packets_every_node_is_named() -> None:
    pairs = measured("abcde", lossy="a b c d e")
    bad = [pair for pair in pairs if pair.loses]
    assert len(bad) == 10
    assert nodes_at_fault(bad, pairs) == list("abcde")


def test_of_two_nodes_the_only_pair_is_measured_again() -> None:
    pairs = measured("ab")
    assert slow_pairs(pairs) == []
    assert suspicious_pairs(pairs) == pairs


def test_a_high_latency_alone_makes_a_pair_slow() -> None:
    pairs = measured("abc")
    late = replace(pairs[0], best_latency_s=2e-3)
    assert slow_pairs([late, *pairs[1:]]) == [late]


def test_a_second_measurement_can_only_acquit() -> None:
    first, second = measured("ab", slow="ab", lossy="ab")[0], measured("ab")[0]
    best = first.best_of(second)
    assert best.bytes_per_s == FAST
    assert not best.loses
    assert first.best_of(None) is first


def test_a_few_repeated_segments_are_no_loss() -> None:
    (pair,) = measured("ab")
    assert not replace(pair, first_repeated=2, first_sent=10).loses
    assert not replace(pair, first_repeated=5, first_sent=100_000).loses
    assert replace(pair, first_repeated=20).loses


def test_a_pair_survives_json() -> None:
    (pair,) = measured("ab", lossy="ab")
    assert from_json(Pair, asdict(pair)) == pair


NOW = {"pair_bandwidth": 1e9, "pair_latency_s": 1e-5, "disk_bandwidth": 2e8, "device_flops": 1e12}


def test_the_first_figures_are_stored_and_equal_ones_found_fine(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    assert compare_with_baseline(path, "a", NOW, renew=False) == []
    assert json.loads(path.read_text())["a"]["figures"] == NOW
    better = {**NOW, "pair_bandwidth": 5e9, "pair_latency_s": 1e-6}
    assert compare_with_baseline(path, "a", better, renew=False) == []
    assert json.loads(path.read_text())["a"]["figures"] == NOW


def test_figures_that_are_much_worse_are_found(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    compare_with_baseline(path, "a", NOW, renew=False)
    worse = {"pair_latency_s": 2e-4, "pair_bandwidth": 4e8, "disk_bandwidth": 6e7, "device_flops": 6e11}
    problems = [one.problem for one in compare_with_baseline(path, "a", worse, renew=False)]
    assert [problem.partition(" on ")[0] for problem in problems] == [
        "pair latency: 200 us, was 10 us",
        "pair bandwidth: 400 MB/s, was 1 GB/s",
        "disk bandwidth: 60 MB/s, was 200 MB/s",
    ]
    # a few microseconds are no finding
    assert compare_with_baseline(path, "a", {"pair_latency_s": 9e-5}, renew=False) == []


def test_a_baseline_that_cannot_be_written_is_a_finding_among_the_others(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.mkdir()
    (finding,) = compare_with_baseline(path, "a", NOW, renew=False)
    assert finding.problem == f"{path} can't be written: Is a directory"


def test_a_baseline_that_something_else_has_written_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text('{"a": 3}')
    assert compare_with_baseline(path, "a", NOW, renew=False) == []
    assert json.loads(path.read_text())["a"]["figures"] == NOW


def test_a_finding_on_the_network_explains_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    compare_with_baseline(path, "a", NOW, renew=False)
    assert compare_with_baseline(path, "a", {**NOW, "pair_bandwidth": 1e6}, renew=False, explained=True) == []


def test_another_request_has_figures_of_its_own_and_renewing_replaces_them(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    compare_with_baseline(path, "a", NOW, renew=False)
    slow = {name: value / 10 for name, value in NOW.items()}
    assert compare_with_baseline(path, "b", slow, renew=False) == []
    assert compare_with_baseline(path, "a", slow, renew=True) == []
    assert json.loads(path.read_text())["a"]["figures"] == slow
