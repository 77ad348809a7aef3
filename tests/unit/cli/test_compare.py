from __future__ import annotations

import json
import re

import pytest

from hpctrain.cli import main
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger, StartFacts
from hpctrain.run.reason import Reason

pytestmark = pytest.mark.usefixtures("no_slurm")
SHORT = ["trainer.max_steps=3", "trainer.eval_every_steps=2", "logger.every_steps=1", "model=mlp", "model.width=8"]


def test_trained_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        assert main([*SHORT, "checkpoint.keep_best=0", f"seed={seed}", f"run_dir=runs/{name}"]) == 0
    capsys.readouterr()
    assert main(["compare", "a", "b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"equal, to the last bit: \d+ metrics at 3 steps and the weights of [12] checkpoints?", lines[-1]
    )
    assert [line.split()[0] for line in lines if line.count(" at step ") == 2] == ["eval/accuracy"]
    assert main(["compare", "a", "c", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["deciding"], report["should_be_equal"], report["divergence"]) == ({"seed": [0, 1]}, False, None)
    # the same configuration, other results
    config = (tmp_path / "runs/c/config.yaml").read_text()
    (tmp_path / "runs/c/config.yaml").write_text(config.replace("seed: 1\n", "seed: 0\n"))
    assert main(["compare", "a", "c"]) == 1
    shown = capsys.readouterr().out
    assert "the first difference of metrics is at step 1:" in shown
    assert "the weights of the checkpoints of step 3 differ" in shown
    assert "B  attempt 1: steps 0 to 3, completed, world size 1, on" in shown
    (tmp_path / "runs/c/metrics.jsonl").write_text("torn")
    (tmp_path / "runs/c/manifest.json").unlink()
    assert main(["compare", "a", "c", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["divergence"]["step"], report["divergence"]["checkpoint"]) == (None, 3)
    assert main(["compare", "a", "nothing"]) == 2


def _write_run(path, *, loss, git=None, ends=((0, 40),), gpu=None):
    """Write a run of attempts from one step to another."""
    run = RunDirectory.at(path)
    (path / "attempts").mkdir(parents=True)
    run.config.write_text("seed: 0\ncheckpoint:\n  metric: accuracy\n  metric_mode: max\n")
    run.manifest.write_text(json.dumps({"git": git}))
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in loss))
    ledger = Ledger(run)
    for begin, end in ends:
        attempt = ledger.claim()
        ledger.start(attempt, StartFacts(gpu=gpu), job_id=None, nodes=["n1"], world_size=1, step=begin)
        ledger.end(attempt, reason=Reason.PREEMPTED, step=end)


def _lines(*losses):
    return [{"step": 10 * n, "time": 1.0, "train/loss": loss} for n, loss in enumerate(losses, 1)]


def test_attempts_around_the_first_difference(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ends = [(0, 10), (10, 20), (20, 30), (30, 40)]
    _write_run(tmp_path / "runs/a", loss=_lines(4.0, 3.0, 2.0, 1.0), ends=ends, gpu="NVIDIA A100")
    _write_run(tmp_path / "runs/b", loss=_lines(4.0, 3.0, 2.5, 1.0), gpu="NVIDIA H100")
    assert main(["compare", "a", "b"]) == 1
    shown = capsys.readouterr().out
    assert "first difference of metrics is at step 30:" in shown
    assert [line.split(":")[0] for line in shown.splitlines() if "attempt" in line] == [
        "A  attempt 2",
        "A  attempt 3",
        "A  2 other attempts not shown",
        "B  attempt 1",
    ]
    assert "GPUs" in shown
    assert "NVIDIA A100" in shown


CLEAN = {"commit": "c1", "diff": "", "diff_left_out": False}


@pytest.mark.parametrize(
    ("one", "other", "code", "claim"),
    [
        (None, None, "code: unknown for A and B, so it may differ", "their code may differ;"),
        (CLEAN, None, "code: unknown for B, so it may differ", "their code may differ;"),
        (CLEAN, CLEAN | {"diff_left_out": True}, "code: unknown for B, so it may differ", "their code may differ;"),
        (CLEAN, CLEAN, "code: no difference", "they should be equal;"),
        (CLEAN, CLEAN | {"commit": "c2"}, "code:", "the runs differ in what decides the weights"),
    ],
)
def test_code_that_was_not_recorded_may_differ(one, other, code, claim, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _write_run(tmp_path / "runs/a", loss=_lines(1.0), git=one)
    _write_run(tmp_path / "runs/b", loss=_lines(2.0), git=other)
    main(["compare", "a", "b"])
    shown = capsys.readouterr().out.splitlines()
    assert code in shown
    assert any(line.startswith(claim) for line in shown)


@pytest.mark.parametrize(("diff", "same"), [("", True), ("+changed", False)])
def test_copy_beside_a_commit(diff, same, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        _write_run(tmp_path / "runs" / name, loss=_lines(1.0), git=CLEAN | ({"diff": diff} if name == "a" else {}))
    record = {"digest": "d1", "folder": "code/d1", "root": "/p", "working_directory": ".", "commit": "c1"}
    record |= {"files": 1, "bytes": 1, "time": 1.0}
    (tmp_path / "runs/a/code.jsonl").write_text(json.dumps(record) + "\n")
    main(["compare", "a", "b"])
    assert ("code: no difference" in capsys.readouterr().out) == same


def test_runs_without_anything_in_common(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _write_run(tmp_path / "runs/a", loss=_lines(1.0), git=CLEAN)
    _write_run(tmp_path / "runs/b", loss=[], git=CLEAN)
    assert main(["compare", "a", "b"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "nothing to compare: they have no metric and no checkpoint of the same step"
    (tmp_path / "runs/b/config.yaml").write_text("{")
    assert main(["compare", "a", "b"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "whether they should be equal isn't known: config.yaml of B can't be read"
