"""A program of DDP's that knows nothing of hpctrain, and saves only at SIGTERM; `--reports` adds the session."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

pace, steps, reports = Path(sys.argv[1]), int(sys.argv[2]), "--reports" in sys.argv
stop = torch.zeros(1)
signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), Path(os.environ["HPCTRAIN_CHECKPOINT_DIR"])
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
if (folder / "saved.pt").exists():
    state = torch.load(folder / "saved.pt")
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
if reports:
    from hpctrain import session

    session.start(total_steps=steps)
while step < steps:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    step += 1
    print(f"step {step}\n", end="", flush=True)  # one write: two processes have the same log
    if reports:
        session.step(step)
    time.sleep(float(pace.read_text()))
    asked = stop.clone()
    dist.all_reduce(asked)
    if asked and rank == 0:
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "new.pt")
        (folder / "new.pt").replace(folder / "saved.pt")
        if reports:
            session.saved(step, folder / "saved.pt")
    if asked:
        sys.exit()
if rank == 0:
    torch.save(model.state_dict(), folder / "final.pt")
time.sleep(0.2)  # torch aborts a Python that ends while a thread of gloo still needs the GIL for the last collective
dist.destroy_process_group()
