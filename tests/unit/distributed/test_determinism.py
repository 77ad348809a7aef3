import subprocess
import sys

import torch

from hpctrain.distributed.determinism import set_determinism

PROGRAM = """
import os, sys, torch
from hpctrain.distributed.determinism import set_determinism
set_determinism(False)
assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
assert "torch._dynamo" not in sys.modules
set_determinism(True)
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
set_determinism(False)
assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
"""


def test_it_sets_what_torch_needs_and_takes_it_back_for_the_next_run_in_this_process():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_the_users_own_workspace_stays():
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    try:
        set_determinism(True, variables)
        assert variables == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    finally:
        set_determinism(False)
    assert not torch.are_deterministic_algorithms_enabled()
