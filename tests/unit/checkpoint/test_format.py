from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.rng import rng_state
from hpctrain.checkpoint.state import Head, LiveState, weights_digest
from hpctrain.run.checkpoint_manifest import MANIFEST
from tests.unit.checkpoint.documented import run

PAGE = Path(__file__).parents[3] / "docs/reference/checkpoint_format.md"
PLAIN = """
import json, sys
sys.modules["hpctrain"] = None
import torch
parts = {name: torch.load(f"{sys.argv[1]}/{name}.pt", weights_only=True) for name in ("model", "optimizer", "state")}
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
model.bfloat16().load_state_dict(parts["model"])
torch.optim.AdamW(model.parameters()).load_state_dict(parts["optimizer"])
print(json.dumps([parts["state"]["step"], len(parts["state"]["rng"]), list(parts["state"]), model[3].bias.tolist()]))
"""


@pytest.fixture
def published(writer, trained):
    model, optimizer = trained()
    model.bfloat16()
    wrapped = torch.compile(model, backend="eager")
    head = Head(step=100, samples_seen=6400, world_size=2, config_digest="c0")
    path = writer.write(
        LiveState(
            wrapped, {"": optimizer}, extra={"ema": model.state_dict()}, head=head, rng=[rng_state()] * 2
        ).capture()
    )
    return path, model


def test_plain_torch_reads_it_with_nothing_of_ours(published, tmp_path):
    path, model = published
    done = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN, path], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    step, ranks, keys, bias = json.loads(done.stdout)
    assert (step, ranks, bias) == (100, 2, model[3].bias.tolist())
    rows = PAGE.read_text().split("## state.pt")[1].split("##")[0]
    assert set(keys) == {
        name for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }


def test_the_documented_program_computes_the_recorded_digest(published):
    path, model = published
    (program,) = re.findall(r"```python\n(import hashlib.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(program.splitlines()) <= 10
    manifest = json.loads((path / MANIFEST).read_text())
    assert run(program, path / "model.pt").strip() == manifest["weights_digest"] == weights_digest(model.state_dict())


def test_the_manifest_has_the_documented_fields_in_their_order(published):
    path, _ = published
    documented = json.loads(re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
    manifest = json.loads((path / MANIFEST).read_text())
    assert list(manifest) == list(documented)
    assert list(manifest["files"]) == ["model.pt", "optimizer.pt", "state.pt"]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "model.pt", "optimizer.pt", "state.pt"]


def test_names_are_plain_and_tensors_on_the_cpu(published):
    path, _ = published
    model = torch.load(path / "model.pt", weights_only=True)
    expected = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).state_dict()
    assert list(model) == list(expected)
    assert {str(tensor.device) for tensor in model.values()} == {"cpu"}
