"""DistributedDataParallel on scikit-learn's digits; after any interruptions it ends with the same weights.

python -m hpctrain run cluster.processes_per_node=2 -- python ddp.py 200
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpctrain import session


def main() -> None:
    steps = int(sys.argv[1])
    session.start(total_steps=steps)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(digits)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # without find_unused_parameters, the order of a sum over ranks changes after the first step of each attempt
    model = DistributedDataParallel(network, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if save := session.last_save():
        state = torch.load(save.path, weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = save.step
    while step < steps:
        batch = torch.randint(len(labels), (64,), generator=torch.Generator().manual_seed(step))[rank::world_size]
        loss = cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        session.step(step, {"train/loss": loss} if rank == 0 else None)
        stop = session.should_stop()
        if rank == 0 and (stop or step % 50 == 0 or step == steps):
            path = session.checkpoint_dir() / f"step_{step:08d}.pt"
            new = path.with_suffix(".new")
            torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, new)
            session.saved(step, new.replace(path))
        if stop and step < steps:
            sys.exit()  # without session.done(), the run is requeued
    session.done()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
