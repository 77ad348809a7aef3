import logging
import os

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.state import Head, LiveState
from hpctrain.checkpoint.warm_start import read_weights, warm_start
from hpctrain.errors import CheckpointError


def net(outputs=2):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(1)
    path = tmp_path / "weights.pt"
    torch.save(net().state_dict(), path)
    return path


def test_all_weights_and_buffers_are_taken(source):
    model = net()
    taken = warm_start(model, source)
    saved = torch.load(source, weights_only=True)
    assert set(taken) == set(saved)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_a_pattern_takes_a_part(source):
    model, before = net(), net().state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert warm_start(model, source, match="0.*") == ["0.bias", "0.weight"]
    assert torch.equal(model.state_dict()["2.weight"], before["2.weight"])
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_another_head_is_refused_by_name_and_nothing_is_copied(source):
    model = net(outputs=7)
    before = model[0].weight.clone()
    with pytest.raises(CheckpointError, match=r"of another shape: 2\.bias, 2\.weight.*init_strict=false"):
        warm_start(model, source)
    assert torch.equal(model[0].weight, before)


def test_what_fits_is_taken_where_that_is_enough(source, caplog):
    with caplog.at_level(logging.INFO, "hpctrain.checkpoint"):
        assert "0.weight" in warm_start(net(outputs=7), source, strict=False)
    assert "left as they were: of another shape: 2.bias, 2.weight" in caplog.text


def test_nothing_that_matches_is_an_error(source):
    with pytest.raises(CheckpointError, match=r"no weight matches other\.\*"):
        warm_start(net(), source, match="other.*", strict=False)


class Remembering(nn.Linear):
    """Keeps more than tensors."""

    def __init__(self):
        super().__init__(3, 2)
        self.memory = {"scale": 1.0}

    def get_extra_state(self):
        return self.memory

    def set_extra_state(self, state):
        self.memory = state


@pytest.mark.parametrize("in_a_file", [True, False], ids=["file", "checkpoint"])
def test_extra_state_that_is_not_a_tensor_stays_as_it_is(tmp_path, writer, in_a_file):
    other = nn.Sequential(Remembering())
    other[0].memory = {"scale": 9.0}
    if in_a_file:
        source = tmp_path / "weights.pt"
        torch.save(other.state_dict(), source)
    else:
        head = Head(step=1, samples_seen=8, world_size=1, config_digest="c0")
        source = writer.write(LiveState(other, {"": torch.optim.SGD(other.parameters())}, head=head).capture())
    model = nn.Sequential(Remembering())
    assert warm_start(model, source) == ["0.bias", "0.weight"]
    assert torch.equal(model[0].weight, other[0].weight)
    assert model[0].memory == {"scale": 1.0}


def test_a_run_whose_newest_checkpoint_is_not_intact_is_named(directory, writer, caplog):
    directory.config.touch()
    other = net()
    for step in (1, 2):
        head = Head(step=step, samples_seen=8, world_size=1, config_digest="c0")
        newest = writer.write(LiveState(other, {"": torch.optim.SGD(other.parameters())}, head=head).capture())
    (newest / "model.pt").unlink()
    warm_start(net(), directory.path)
    assert f"taking {directory.checkpoint(1)}, since what is newer is not intact: {newest}" in caplog.text
    (directory.checkpoint(1) / "model.pt").unlink()
    with pytest.raises(CheckpointError, match="is a run without an intact checkpoint"):
        warm_start(net(), directory.path)


@pytest.mark.parametrize("content", [b"", b"no weights", [1, 2], {"model": {}, "epoch": 3}])
def test_a_file_that_holds_something_else(tmp_path, content):
    path = tmp_path / "w.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"w\.pt"):
        warm_start(net(), path)


class Evil:
    def __reduce__(self):
        return (os.system, ("true",))


def test_what_could_execute_code_is_refused_without_torchs_advice_to_allow_it(tmp_path):
    torch.save({"weight": Evil()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError) as raised:
        read_weights(tmp_path / "w.pt")
    assert "it contains more than tensors and plain values (posix.system), or is damaged" in str(raised.value)
    assert "weights_only" not in str(raised.value)


@pytest.mark.parametrize("content", [b"hello\x80\x04", b"root:x:0:0:", b"\x80\x02.", b""])
def test_a_file_of_another_kind_is_one_error(tmp_path, content):
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w\.pt can't be read: "):
        read_weights(tmp_path / "w.pt")
