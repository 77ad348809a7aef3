import random

import numpy as np
import torch

from hpctrain.distributed.seed import rank_seed, seed_everything


def test_rank_zero_has_the_runs_seed_and_every_other_rank_one_of_its_own():
    for seed in (0, 1, 2**63 - 1):
        seeds = [rank_seed(seed, rank) for rank in range(1000)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 1000
        assert all(0 <= one < 2**63 for one in seeds)


def test_neighbouring_seeds_share_no_rank():
    assert not {rank_seed(0, rank) for rank in range(1000)} & {rank_seed(1, rank) for rank in range(1000)}


def test_all_generators_follow_the_seed():
    def draw(seed):
        seed_everything(seed)
        return random.random(), np.random.random(), torch.rand(1).item()

    for seed in (0, 2**32 + 5, 2**63 - 1):
        assert draw(seed) == draw(seed)
    assert all(one != other for one, other in zip(draw(1), draw(2), strict=True))
