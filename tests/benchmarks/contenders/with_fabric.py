"""Lightning's Fabric: the person's own loop, with its set-up and backward."""

import torch
from lightning.fabric import Fabric

from tests.benchmarks.contenders.workload import Workload

work = Workload()
fabric = Fabric(accelerator="cpu", devices=work.world_size, strategy="ddp" if work.world_size > 1 else "auto")
fabric.launch()
model = work.model()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
batches = work.epochs()
for _ in range(work.steps):
    features, labels = next(batches)
    loss = work.loss(model, features, labels)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
work.report()
work.leave()
