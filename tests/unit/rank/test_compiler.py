from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from hpctrain.rank.compiler import _parts

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from hpctrain.config.parallel import Parallel
from hpctrain.rank.compiler import spare_compiler
from hpctrain.parallel.ddp import replicate
from hpctrain.rank.world import World

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
world = World(rank=0, size=2, local_rank=0, devices=(torch.device("cpu"),), control=dist.group.WORLD)

def train(optimizer_type, model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    optimizer = optimizer_type(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

spare_compiler()
model = replicate(torch.nn.Linear(3, 2), world, Parallel())
types = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop]
spared = [train(kind, model) for kind in types]
assert "torch._dynamo" not in sys.modules, "an optimizer or DDP imports the compiler"
assert "_dynamo" not in vars(torch)

import torch._dynamo
usual = [train(kind, model) for kind in types]
assert all(torch.equal(one, other) for one, other in zip(spared, usual))

compiled = torch.compile(torch.nn.Linear(3, 2), backend="eager")
assert torch.equal(train(torch.optim.AdamW, replicate(compiled, world, Parallel())), usual[0])
"""


@pytest.mark.nightly
def test_the_compiler_is_imported_only_by_code_that_compiles(tmp_path):
    store = tmp_path / "store"
    done = subprocess.run([sys.executable, "-c", PROGRAM, store], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_parts_that_a_task_can_call_are_the_outermost_modules_with_a_forward():
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    head, other = nn.Linear(2, 1), nn.Tanh()
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, nn.ModuleDict({"other": other})]), "head": head})
    assert _parts(model) == [block, other, head]
    assert _parts(head) == []


def test_a_part_that_the_model_holds_twice_is_compiled_once():
    first, shared = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.ModuleDict({"shared": shared, "all": nn.ModuleList([first, shared])})
    assert _parts(model) == [shared, first]
