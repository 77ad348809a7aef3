"""The loop that a person writes: no logging, no stopping, no saving."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.contenders.workload import Workload

work = Workload()
model = work.model()
if work.world_size > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = work.epochs()
for _ in range(work.steps):
    features, labels = next(batches)
    loss = work.loss(model, features, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
work.report()
work.leave()
