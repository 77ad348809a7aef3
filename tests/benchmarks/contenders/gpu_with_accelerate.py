"""Hugging Face's Accelerate on one GPU, in bf16: the person's own loop, with its prepared model and optimizer."""

import os

import torch
from accelerate import Accelerator

from tests.benchmarks.contenders.gpu_workload import GpuWorkload

work = GpuWorkload()
kind = work.kind
accelerator = Accelerator(
    cpu=work.device.type == "cpu", mixed_precision="bf16", dynamo_backend="inductor" if work.compiled else "no"
)
model = work.model()
if kind.channels_last:
    model = model.to(memory_format=torch.channels_last)
optimizer = getattr(torch.optim, kind.optimizer)(model.parameters(), fused=True, **kind.options)
model, optimizer = accelerator.prepare(model, optimizer)


def forward(features):
    return model(features.contiguous(memory_format=torch.channels_last) if kind.channels_last else features)


for step, batch in enumerate(work.batches(), 1):
    features, labels = (tensor.to(accelerator.device, non_blocking=True) for tensor in batch)
    with accelerator.autocast():
        loss = work.loss(forward, features, labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step == work.steps:
        break
    if step % work.block == 0:
        work.save(lambda: accelerator.save_state("saved"))
work.report()
os._exit(0)
