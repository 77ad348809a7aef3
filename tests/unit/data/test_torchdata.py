"""With torchdata itself."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import Sampler

from hpctrain.data import bookmark
from hpctrain.data.plan import BatchPlan
from tests.unit.stream_steps import read_steps

pytestmark = pytest.mark.nightly
LENGTH = 24
STEPS = 12


class Shuffled(Sampler):
    """Another order in each epoch, which torchdata counts."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(LENGTH).tolist())

    def __len__(self):
        return LENGTH


def shuffled():
    nodes = pytest.importorskip("torchdata.nodes")

    class Numbers(nodes.Loader):
        def __len__(self):
            return LENGTH

    return Numbers(nodes.MapStyleWrapper(map_dataset=list(range(LENGTH)), sampler=Shuffled()))


class Around:
    """What a user writes around a loader."""

    def __init__(self):
        self.loader = shuffled()

    def __len__(self):
        return LENGTH

    def __iter__(self):
        yield from self.loader

    def state_dict(self):
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state):
        self.loader.load_state_dict(state["loader"])


def read(data, steps, marks=(), *, start_step=0, world_size=1, global_batch_size=8):
    plan = BatchPlan(LENGTH, global_batch_size, global_batch_size // 2, world_size, drop_last=False)
    return read_steps(data, plan, steps, marks, start_step=start_step, collate_fn=list)


@pytest.mark.parametrize("data", [shuffled, Around])
@pytest.mark.parametrize("global_batch_size", [8, LENGTH])
def test_a_loader_continues_in_the_right_pass(data, global_batch_size, monkeypatch):
    monkeypatch.setattr(bookmark, "TIME_SHARE", 1e9)
    straight, _ = read(data, STEPS, global_batch_size=global_batch_size)
    per_epoch = LENGTH // global_batch_size
    assert sorted(number for step in straight[:per_epoch] for number in step) == list(range(LENGTH))
    assert global_batch_size == LENGTH or straight[0] != straight[per_epoch]
    for stop in range(1, STEPS):
        _, marks = read(data, stop, global_batch_size=global_batch_size)
        # with the newest bookmark, one that is older, and none
        for start in {stop, min(stop + 5, STEPS - 1)}:
            for world_size in (1, 2):
                resumed, _ = read(
                    data,
                    STEPS - start,
                    marks,
                    start_step=start,
                    world_size=world_size,
                    global_batch_size=global_batch_size,
                )
                assert resumed == straight[start:], (stop, start, world_size)
        assert read(data, 1, start_step=stop, global_batch_size=global_batch_size)[0] == straight[stop : stop + 1]
