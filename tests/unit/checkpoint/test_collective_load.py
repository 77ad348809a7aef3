from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.checkpoint.collective_load import load_together
from hpctrain.checkpoint.intake import KEPT
from hpctrain.checkpoint.state import Head, capture
from hpctrain.distributed.world import World
from hpctrain.errors import CheckpointUnlikeError

ALONE = World(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),))


@dataclass(frozen=True, kw_only=True)
class ElsewhereInTheWorld(World):
    """A rank to which rank zero has sent its choice."""

    chosen: Path

    def broadcast(self, value):
        return self.chosen, None


@pytest.fixture
def path(writer):
    """A checkpoint with an optimizer's file that is large enough to be kept."""
    model = nn.Linear(2048, 1100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    return writer.write(capture(model, optimizer, head=Head(step=1, samples_seen=1, world_size=1, config_digest="c0")))


def test_only_an_optimizer_on_the_cpu_keeps_what_is_read(directory, path):
    found = load_together(directory, ALONE)
    assert (found.path, found.gives_away) == (path, True)
    on_a_gpu = World(rank=0, size=1, local_rank=0, devices=(torch.device("cuda", 0),))
    assert not load_together(directory, on_a_gpu).gives_away


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["model.pt", KEPT, "state.pt"])
def test_a_node_that_reads_other_bytes_than_rank_zero_finds_out(directory, path, name, device):
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 8
    (path / name).write_bytes(data)
    place = {"size": 4, "devices": (torch.device(device),), "chosen": path}
    with pytest.raises(CheckpointUnlikeError, match=rf"{name} doesn't match .* rank zero read it intact"):
        load_together(directory, ElsewhereInTheWorld(rank=2, local_rank=0, **place))


def test_only_the_first_rank_of_a_node_compares(directory, path, monkeypatch):
    compared = []
    monkeypatch.setattr("hpctrain.checkpoint.reader.verify", lambda path, checksum: compared.append(path) or "")
    place = {"size": 4, "devices": (torch.device("cpu"),), "chosen": path}
    load_together(directory, ElsewhereInTheWorld(rank=3, local_rank=1, **place))
    assert not compared
    load_together(directory, ElsewhereInTheWorld(rank=2, local_rank=0, **place))
    assert compared == [path]
