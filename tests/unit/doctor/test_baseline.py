"""The first figures are kept, and later ones compared with them."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.doctor.baseline import compare_with_baseline, request_name

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
    assert request_name("", 4, 8, 8) == "default, 4 nodes, 8 ranks and 8 GPUs per node"
