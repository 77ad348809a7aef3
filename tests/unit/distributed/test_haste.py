"""Ranks as threads of this process, on one store: whatever the times, all begin each agreement after the same step."""

from __future__ import annotations

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from hpctrain.distributed import haste as module
from hpctrain.distributed.haste import Haste

AHEAD = 50
"""Steps from one agreement to the next: far too many, as when steps have grown slow."""


class Ranks:
    """Loops that go in step, as those of a training do, and agree where they must.

    Args:
        size: number of ranks.
        steps: of the loop.
        seconds: that a step takes, by rank and step.
        late_s: after which an agreement is late.
    """

    def __init__(self, size, steps, seconds, late_s=0.01):
        self.size, self.steps, self.seconds, self.late_s = size, steps, seconds, late_s
        self.store, self.together = HashStore(), threading.Barrier(size)

    def run(self):
        """By rank the steps after which it agreed, and how often an agreement was brought forward."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(self._rank, range(self.size)))

    def _rank(self, rank):
        haste, agreed = Haste(self.store, rank, self.size, self.late_s), []
        haste.start()
        try:
            for step in range(1, self.steps + 1):
                time.sleep(self.seconds(rank, step))
                self.together.wait(30)  # the gradients' all-reduce
                haste.at = step
                while True:
                    if haste.holds:
                        haste.wait()
                    if haste.due is not None and step < haste.due:
                        break
                    if haste.begin():
                        agreed.append(step)
                        haste.end(step + AHEAD)
                        break
        except BaseException:
            self.together.abort()
            raise
        finally:
            haste.close()
        return agreed, haste.moved


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "TICK_S", 0.002)
    monkeypatch.setattr(module, "POLL_S", 0.0002)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_all_agree_after_the_same_steps_whatever_the_times(size, seed):
    draw = random.Random(seed)
    slow = [draw.choice([0.0, 0.0005, 0.002, 0.02]) for _ in range(13)]
    own = [draw.choice([0.0, 0.0, 0.001]) for _ in range(size)]
    found = Ranks(size, 120, lambda rank, step: slow[step // 10] + own[rank] * random.random()).run()
    assert len({tuple(agreed) for agreed, _ in found}) == 1
    # whose loop ends while the last one is sought hears no more of it
    assert max(moved for _, moved in found) - min(moved for _, moved in found) <= 1


def test_slow_steps_bring_agreements_forward():
    found = Ranks(3, 100, lambda _rank, step: 0.03 if step > 20 else 0.0).run()
    agreed, moved = found[0]
    assert moved > 5
    assert max(after - before for before, after in itertools.pairwise(agreed[1:])) < AHEAD / 2


def test_in_time_nothing_is_said():
    ranks = Ranks(2, 100, lambda _rank, _step: 0.0, late_s=1000)
    assert [moved for _, moved in ranks.run()] == [0, 0]


def test_a_rank_that_leaves_releases_those_that_hold():
    """One rank leaves its loop where the other ones still have a step to do."""
    store = HashStore()
    ranks = [Haste(store, rank, 3, late_s=0.0) for rank in range(3)]
    for haste in ranks:
        haste.end(1000)
        haste.begun = 1
        haste.at = 7
        haste.start()
    ranks[1].close()
    give_up = time.monotonic() + 10
    while any(haste.holds for haste in ranks):
        assert time.monotonic() < give_up
    ranks[0].close()
    ranks[2].close()
    dues = {haste.due for haste in (ranks[0], ranks[2])}
    assert len(dues) == 1


def test_alone_there_is_nothing_to_watch():
    haste = Haste(None, 0, 1, late_s=0.0)
    haste.start()
    haste.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hpctrain-haste"]
