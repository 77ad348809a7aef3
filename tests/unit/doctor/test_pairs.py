"""Pairs of nodes: every pair is measured once, and the node of a bad link is named."""

from __future__ import annotations

from itertools import combinations

import pytest

from hpctrain.doctor.pairs import Pair, losing_pairs, nodes_at_fault, pair_rounds, slow_pairs, suspicious

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
    bad = losing_pairs(pairs)
    assert len(bad) == 10
    assert nodes_at_fault(bad, pairs) == list("abcde")


def test_of_two_nodes_the_only_pair_is_measured_again() -> None:
    pairs = measured("ab")
    assert slow_pairs(pairs) == []
    assert suspicious(pairs) == pairs


def test_a_high_latency_alone_makes_a_pair_slow() -> None:
    pairs = measured("abc")
    late = Pair(**{**pairs[0].as_record(), "best_latency_s": 2e-3})
    assert slow_pairs([late, *pairs[1:]]) == [late]


def test_a_second_measurement_can_only_acquit() -> None:
    first, second = measured("ab", slow="ab", lossy="ab")[0], measured("ab")[0]
    best = first.best_of(second)
    assert best.bytes_per_s == FAST
    assert not best.loses
    assert first.best_of(None) is first


def test_a_few_repeated_segments_are_no_loss() -> None:
    (pair,) = measured("ab")
    assert not Pair(**{**pair.as_record(), "first_repeated": 2, "first_sent": 10}).loses
    assert not Pair(**{**pair.as_record(), "first_repeated": 5, "first_sent": 100_000}).loses
    assert Pair(**{**pair.as_record(), "first_repeated": 20}).loses


def test_a_pair_survives_json() -> None:
    (pair,) = measured("ab", lossy="ab")
    assert Pair.from_record(pair.as_record()) == pair
