import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from hpctrain.rank.determinism import DETERMINISM_VARIABLES, rank_seed, seed_everything, set_determinism

PROGRAM = """
import os, sys, torch
from hpctrain.rank.determinism import set_determinism
set_determinism(False)
assert not {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO"} & os.environ.keys()
assert torch.utils.deterministic.fill_uninitialized_memory
assert "torch._dynamo" not in sys.modules
torch.backends.cudnn.benchmark = True
set_determinism(False)
assert torch.backends.cudnn.benchmark
set_determinism(False, cudnn_benchmark=True)
set_determinism(False)
assert not torch.backends.cudnn.benchmark
set_determinism(False, cudnn_benchmark=True)
assert torch.backends.cudnn.benchmark
set_determinism(True)
assert not torch.backends.cudnn.benchmark
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("Ring", "Simple")
assert not torch.utils.deterministic.fill_uninitialized_memory
assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
set_determinism(False)
assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
assert torch.utils.deterministic.fill_uninitialized_memory
"""


def test_determinism_is_set_and_reset_for_the_next_run_in_this_process():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


@pytest.mark.parametrize(("name", "value"), [("CUBLAS_WORKSPACE_CONFIG", ":16:8"), ("NCCL_ALGO", "Tree")])
def test_variables_that_the_user_has_set_stay(name, value):
    variables = {name: value}
    try:
        set_determinism(True, variables)
        assert variables == {**DETERMINISM_VARIABLES, name: value}
    finally:
        set_determinism(False)
    assert not torch.are_deterministic_algorithms_enabled()


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
