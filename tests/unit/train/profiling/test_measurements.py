from __future__ import annotations

import pytest
import torch

from hpctrain.config.compose import Composer
from hpctrain.parallel.mesh import TrainingWorld
from hpctrain.run.bottleneck import PARTS
from hpctrain.train.profiling.bottleneck import Measurements, RankReport, median

ALONE = TrainingWorld(rank=0, size=1, local_rank=0, devices=(torch.device("cpu"),))


@pytest.fixture
def measured():
    """Make measurements of one rank: 999 steps of 0.1 s, by seconds of a timed step's parts."""
    config = Composer().compose([])

    def build(parts, **known):
        report = RankReport(rank=0, host="n1", steps_timed=5, parts={"forward": 0.03, "backward": 0.07} | parts)
        usual = {"step": 1000, "steps": 999, "total_steps": 2000, "steps_per_epoch": 100, "train_s": 999 * 0.1}
        return Measurements(config=config, world=ALONE, reports=[report], **(usual | known))

    return build


def test_shares_are_of_the_whole_time(measured):
    shares = measured({"data": 0.1}, train_s=999 * 0.25, eval_s=200.0, save_s=50.25).shares
    assert tuple(shares) == PARTS
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["data"] == pytest.approx(0.1 * 999 / 500)
    assert shares["evaluation"] == 0.4
    assert shares["between_steps"] == pytest.approx(0.05 * 999 / 500)


def test_shares_of_timed_steps_that_were_slower_than_the_others_are_scaled(measured):
    shares = measured({}, train_s=999 * 0.05).shares
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["between_steps"] == 0


def test_median():
    assert median([3.0]) == 3.0
    assert median([9.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 9.0]) == 3.0
