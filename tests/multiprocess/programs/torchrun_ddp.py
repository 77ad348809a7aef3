"""DDP for torchrun: saves when it is asked to stop. Arguments: the last step; `fails` for an error on rank one."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from hpctrain import session

dist.init_process_group("gloo")
rank, total = dist.get_rank(), int(sys.argv[1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
session.start(total_steps=total)
step, stop = 0, False
while step < total and not stop:
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    step += 1
    session.step(step, {"train/loss": loss.item()})
    if step == 3 and rank == 1 and sys.argv[2:] == ["fails"]:
        raise ValueError("bad sample")
    time.sleep(0.02)
    stop = session.should_stop()
if stop:
    if rank == 0:
        path = session.checkpoint_dir() / f"{step}.pt"
        torch.save(model.state_dict(), path)
        session.saved(step, path)
    sys.exit()
session.done()
dist.destroy_process_group()
