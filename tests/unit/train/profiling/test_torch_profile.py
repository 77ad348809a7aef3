from __future__ import annotations

import json
import logging

import pytest
import torch

from hpctrain.train.profiling.profiler import TorchProfile


@pytest.fixture
def profile(tmp_path):
    return TorchProfile(3, 5, tmp_path / "profile" / "rank_0.pt.trace.json", torch.device("cpu"))


def traced(tmp_path):
    record = json.loads((tmp_path / "profile" / "rank_0.pt.trace.json").read_bytes())
    return sum(event.get("name") == "aten::mm" for event in record["traceEvents"])


def steps(profile, begin, end):
    """Do steps as the loop does; return the traced ones, counted from 1."""
    found = []
    for step in range(begin, end):
        if profile.next_after(step) == step:
            profile.trace(step, lambda: torch.ones(2, 2) @ torch.ones(2, 2))
            found.append(step + 1)
    return found


def test_the_trace_has_the_configured_steps(profile, tmp_path):
    assert steps(profile, 0, 9) == [3, 4, 5]
    assert traced(tmp_path) == 3


def test_an_attempt_that_starts_in_the_middle_traces_the_rest(profile, tmp_path):
    assert steps(profile, 3, 9) == [4, 5]
    assert traced(tmp_path) == 2


def test_an_attempt_that_starts_later_traces_nothing(profile, tmp_path):
    assert steps(profile, 5, 9) == []
    profile.close()
    assert not (tmp_path / "profile").exists()


def test_a_run_that_ends_early_writes_what_was_traced(profile, tmp_path):
    assert steps(profile, 0, 4) == [3, 4]
    profile.close()
    assert traced(tmp_path) == 2


def test_a_failed_write_is_a_warning(profile, tmp_path, caplog):
    (tmp_path / "profile").touch()
    with caplog.at_level(logging.WARNING, "hpctrain.train"):
        steps(profile, 0, 9)
    assert "can't write the trace" in caplog.text
