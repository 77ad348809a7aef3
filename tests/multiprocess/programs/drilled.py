"""A program of plain DDP with a session, and the way to resume it: `drilled.py STEPS [WITHOUT_OPTIMIZER]`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain import session

steps, *broken = map(int, sys.argv[1:])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
session.start(total_steps=steps)
if save := session.last_save():
    state = torch.load(save.path, weights_only=True)
    model.module.load_state_dict(state["model"])
    if not broken:
        optimizer.load_state_dict(state["optimizer"])
    step = save.step
while step < steps:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    time.sleep(0.03)
    session.step(step, {"train/loss": loss.item()})
    stop = session.should_stop()
    if stop or step == steps:
        if rank == 0:
            path = session.checkpoint_dir() / f"step_{step}.pt"
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
            session.saved(step, path)
        dist.barrier()
    if stop:
        sys.exit()
session.done()
dist.destroy_process_group()
