"""`export` as it is typed; the process that writes is a real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hpctrain.checkpoint.state import Head, LiveState
from hpctrain.checkpoint.write import CheckpointWriter
from hpctrain.cli import main
from hpctrain.run.directory import RunDirectory
from hpctrain.run.evaluation import Score
from hpctrain.run.ledger import Claim, Ledger


class Stateful(nn.Linear):
    """A layer with extra state that isn't a tensor."""

    def get_extra_state(self):
        return {"calls": 7}


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Write a checkpoint of runs/lm, whose weights are all the step, and the averages the step and a half."""
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.at("runs/lm")
    directory.create(0o750)
    directory.config.touch()
    ledger = Ledger(directory)
    writer = CheckpointWriter(directory, Claim(ledger, ledger.claim()))

    def write(step, accuracy=None, *, averaged=False, size=3, extra_state=False):
        model = (Stateful if extra_state else nn.Linear)(size, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        ema = {name: parameter.detach() + 0.5 for name, parameter in model.named_parameters()}
        score = None if accuracy is None else Score("accuracy", "max", accuracy)
        head = Head(step=step, samples_seen=step, world_size=1, config_digest="c", score=score)
        optimizer = torch.optim.SGD(model.parameters())
        return writer.write(
            LiveState(model, {"": optimizer}, head=head, extra={"ema": ema} if averaged else {}).capture()
        )

    return write


def damage(path):
    data = bytearray((path / "model.pt").read_bytes())
    data[-400] ^= 1
    (path / "model.pt").write_bytes(data)


def value(file):
    """The number that all weights in a file are."""
    (found,) = {float(number) for tensor in load_file(file).values() for number in tensor.flatten()}
    return found


def test_the_newest_intact_checkpoint(save, capfd):
    save(1)
    save(2)
    damage(save(3))
    assert main(["export", "lm", "-o", "model.safetensors"]) == 0
    assert value("model.safetensors") == 2
    out, err = capfd.readouterr()
    assert out == (
        "wrote model.safetensors: weights of step 2, 2 tensors, 32 bytes; to read it: "
        'safetensors.torch.load_file("model.safetensors")\n'
    )
    assert err.startswith(
        "hpctrain: warning: runs/lm/checkpoints/step_00000003 is not intact, and passed over: model.pt"
    )
    assert err.count("\n") == 1
    assert sorted(map(str, Path().iterdir())) == ["model.safetensors", "runs"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["--step", "best"], 2, marks=pytest.mark.nightly),
        pytest.param(["--step", "2", "--ema"], 2.5, marks=pytest.mark.nightly),
        (["--step", "ema"], 3.5),
    ],
)
def test_the_best_a_step_and_the_average(save, capfd, words, expected):
    save(1, 0.5)
    save(2, 0.9, averaged=True)
    save(3, 0.7, averaged=True)
    Path("model.safetensors").write_text("an older export")
    assert main(["export", "lm", "-o", "model.safetensors", "--force", *words]) == 0
    assert value("model.safetensors") == expected
    out, err = capfd.readouterr()
    assert out.startswith(f"wrote model.safetensors: {'averaged weights' if expected % 1 else 'weights'} of step ")
    assert err == "the checkpoint has averaged weights, too: --ema exports them\n" * (expected == 2)


@pytest.mark.nightly
def test_a_checkpoint_without_averages(save, capfd):
    save(1, 0.5)
    save(2, 0.9, averaged=True)
    assert main(["export", "lm", "-o", "other.pt", "--step", "1", "--ema"]) == 1
    assert "step_00000001 has no averaged weights: trainer.ema_decay was not set" in capfd.readouterr().err
    assert not Path("other.pt").exists()


@pytest.mark.nightly
def test_a_folder_in_another_type(save, capfd):
    save(1, averaged=True, extra_state=True)
    assert main(["export", "lm", "-o", "published/", "--dtype", "bf16", "--max-shard-gb", "0.000001"]) == 0
    assert load_file("published/model.safetensors")["weight"].dtype == torch.bfloat16
    out, err = capfd.readouterr()
    assert '16 bytes in 1 file; to read it: safetensors.torch.load_file("published/model.safetensors")' in out
    assert "hpctrain: warning: left out, since it isn't a tensor: _extra_state\n" in err
    save(70000, size=600)
    assert main(["export", "lm", "-o", "published", "--dtype", "fp16", "--max-shard-gb", "0.000001", "--force"]) == 0
    out, err = capfd.readouterr()
    assert 'in 2 files; to read it: huggingface_hub.load_torch_model(model, "published")' in out
    assert "warning: values that fp16 can't represent became infinite: weight, bias\n" in err
    index = json.loads(Path("published/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in Path("published").glob("*.safetensors")}


def typed(*words):
    """The exit code of a command; argparse exits by itself."""
    try:
        return main(["export", *words])
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-o", "a.safetensors", "--step", "3"], 1, "step_00000003 is not intact: model.pt doesn't match its checksum"),
        (["-o", "a.safetensors", "--step", "best"], 1, "runs/lm: no checkpoint has a score"),
        (["-o", "a.safetensors", "--step", "7"], 1, "runs/lm: no checkpoint of step 7; there are 1, 3"),
        (["-o", "a.safetensors", "--step", "newest"], 2, "expected a step, best or ema, got 'newest'"),
        (["-o", "there.pt"], 2, "-o=there.pt: exists; choose another name, or add --force to replace it"),
        (["-o", "there"], 2, "-o=there: exists; choose another name, or add --force to replace its weights, and keep"),
        (["-o", "there/", "--step", "3", "--force"], 1, "is not intact"),
        (["-o", "plain"], 2, "-o=plain: is a file without .pt or .safetensors; choose another name"),
        (["-o", "folder.pt", "--force"], 2, "-o=folder.pt: is a folder; choose another name"),
        (["-o", "model.onnx"], 2, "-o=model.onnx: is not a kind of file that export writes; end it with .pt or"),
        (["-o", "missing/a.pt"], 2, "-o=missing/a.pt: its folder doesn't exist; mkdir -p missing"),
        (["-o", "a.pt", "--max-shard-gb", "1"], 2, "--max-shard-gb=1.0: is for folders"),
        ([], 2, "the following arguments are required: -o"),
    ],
)
def test_what_is_refused_writes_nothing(save, tmp_path, capfd, words, code, message):
    save(1)
    damage(save(3))
    Path("there.pt").write_text("mine")
    Path("plain").write_text("mine")
    for folder in ("there", "folder.pt"):
        Path(folder).mkdir()
        Path(folder, "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert typed("lm", *words) == code
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("there.pt").read_text() == "mine"


def test_runs_without_weights(save, capfd):
    assert main(["export", "lm", "-o", "a.pt"]) == 1
    assert "runs/lm: the run has saved no checkpoint yet" in capfd.readouterr().err
    damage(save(1))
    assert main(["export", "lm", "-o", "a.pt"]) == 1
    assert "runs/lm: no checkpoint of the run is intact" in capfd.readouterr().err
    assert main(["export", "nothing", "-o", "a.pt"]) == 2
    Path("runs/lm/config.yaml").write_text("run:\n  command: [python, train.py]\n")
    assert main(["export", "lm", "-o", "a.pt"]) == 2
    assert "RUN=lm: is the run of a program" in capfd.readouterr().err


@pytest.mark.nightly
def test_a_file_in_the_working_directory_is_not_imported(save):
    save(1)
    for name in ("json.py", "torch.py", "hpctrain.py"):
        Path(name).write_text("raise SystemExit('imported')")
    assert main(["export", "lm", "-o", "model.pt"]) == 0
    assert torch.load("model.pt", weights_only=True)["bias"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("number", "send", "code"),
    [
        (signal.SIGINT, os.killpg, 4),  # Ctrl-C on a terminal
        pytest.param(signal.SIGINT, os.kill, 4, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, os.kill, -9, marks=pytest.mark.nightly),
    ],
)
def test_an_interrupted_export_leaves_nothing(save, tmp_path, number, send, code):
    save(1, size=50_000_000)
    command = [sys.executable, "-m", "hpctrain", "export", "lm", "-o", "model.safetensors"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".tmp-*/model.safetensors")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        send(process.pid, number)
        # until the process that writes has ended, too
        assert process.stderr.read() == ""
        assert process.wait(30) == code
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
