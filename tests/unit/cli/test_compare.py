from __future__ import annotations

import json

import pytest

from hpctrain.cli import main

pytestmark = pytest.mark.usefixtures("no_slurm")
SHORT = ["trainer.max_steps=3", "trainer.eval_every_steps=2", "logger.every_steps=1", "model=mlp", "model.width=8"]


def test_trained_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, seed in [("a", 0), ("b", 0), ("c", 1)]:
        assert main([*SHORT, f"seed={seed}", f"run_dir=runs/{name}"]) == 0
    capsys.readouterr()
    assert main(["compare", "a", "b"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("equal: every metric that both logged")
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
