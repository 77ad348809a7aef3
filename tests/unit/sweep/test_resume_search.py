"""The continuation of a search whose tasks are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from searching import prepared, train

from hpctrain.errors import ExitCode
from hpctrain.run.reason import Reason
from hpctrain.search.open_search import open_search
from hpctrain.search.record import SweepRecord
from hpctrain.sweep.resume_search import resume_search


def test_a_search_with_failed_runs_did_not_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = prepared(tmp_path, 2)
    record = SweepRecord(
        kind="asha",
        space={},
        fixed=[],
        folder=str(tmp_path),
        submitted=0.0,
        command=[],
        num_runs=2,
        min_steps=10,
        reduction_factor=3,
    )
    search = open_search(home, record)
    while (assignment := search.ask("here:1", max_new_runs=None)) is not None:
        train(search, assignment, 0.5, reason=Reason.FAILED)
    template: Any = None  # nothing is submitted
    assert resume_search(home, record, template) == ExitCode.FAILED
    out = capsys.readouterr().out
    assert "2 runs failed" in out
    assert "complete" not in out
