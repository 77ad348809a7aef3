"""The loop that a person writes for one GPU: autocast, a fused optimizer, page-locked batches, and torch.save."""

from pathlib import Path

import torch

from tests.benchmarks.contenders.gpu_workload import GpuWorkload

work = GpuWorkload()
device, kind = work.device, work.kind
model = work.model().to(device)
if kind.channels_last:
    model = model.to(memory_format=torch.channels_last)
called = torch.compile(model) if work.compiled else model
optimizer = getattr(torch.optim, kind.optimizer)(model.parameters(), fused=True, **kind.options)
target = Path("saved.pt")


def forward(given):
    return called(given.contiguous(memory_format=torch.channels_last) if kind.channels_last else given)


def save():
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target)


for step, batch in enumerate(work.batches(), 1):
    features, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = work.loss(forward, features, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == work.steps:
        break
    if step % work.block == 0:
        work.save(save)
work.report()
