"""Hugging Face's Accelerate: the person's own loop, with its prepared model and optimizer."""

import torch
from accelerate import Accelerator

from tests.benchmarks.contenders.workload import Workload

work = Workload()
accelerator = Accelerator(cpu=True)
model = work.model()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
batches = work.epochs()
for _ in range(work.steps):
    features, labels = next(batches)
    loss = work.loss(model, features, labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
work.report()
work.leave()
