from __future__ import annotations

from hpctrain.status.run_status import waiting_note
from tests.unit.runs_before import run_before


def test_the_runs_that_have_not_completed_are_named(tmp_path):
    paths = [
        str(run_before(tmp_path / name, reason).path)
        for name, reason in (("done", "completed"), ("going", "preempted"), ("bad", "failed"), ("new", ""))
    ]
    named = f"{tmp_path}/going, {tmp_path}/bad (failed) and {tmp_path}/new"
    assert waiting_note(paths) == f"it waits for {named} to complete"
    assert waiting_note(paths[:1]) == ""


def test_many_runs_are_counted(tmp_path):
    paths = [str(run_before(tmp_path / str(number)).path) for number in range(9)]
    shown = ", ".join(paths[:3])
    assert waiting_note(paths) == f"it waits for {shown} and 6 more to complete"
