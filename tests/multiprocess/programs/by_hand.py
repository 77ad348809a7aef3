"""What a user would write without hpctrain: the loop that its weights are compared with."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpctrain.data.order import ShuffledOrder
from hpctrain.rank.determinism import rank_seed
from tests.multiprocess.programs.trial import network, table


def train(path, rank, size, *, samples, steps, batch, micro, drop_last=False, seed=0, clip=None, **options):
    """Train as one rank, and save the weights."""
    torch.manual_seed(seed)
    model = network(**options)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    features, labels, _ = table(samples)
    order, per_epoch = ShuffledOrder(samples, seed), samples // batch if drop_last else math.ceil(samples / batch)
    torch.manual_seed(rank_seed(seed, rank))
    if size > 2:
        throwaway(model, features, labels, order(0, np.arange(batch))[: batch // size])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * step / (steps - 1)))
        epoch, begin = step // per_epoch, step % per_epoch * batch
        indices = order(epoch, np.arange(begin, min(begin + batch, samples)))
        pieces = np.array_split(indices, math.ceil(len(indices) / (micro * size)) * size)
        mine = pieces[rank::size]
        for piece in mine:
            chosen = torch.from_numpy(piece if len(piece) else indices[:1])
            share = len(indices) / (len(piece) * size) if len(piece) else math.inf
            with model.no_sync() if size > 1 and piece is not mine[-1] else contextlib.nullcontext():
                (cross_entropy(model(features[chosen]), labels[chosen]) / share).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        torch.save(getattr(model, "module", model).state_dict(), path)


def throwaway(model, features, labels, indices):
    """DDP's first backward uses other buckets than all later ones; hpctrain does one before the first step."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng():
        cross_entropy(model(features[indices]), labels[indices]).backward()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    model.zero_grad()


def main(path, rank, size, options):
    train(path, rank, size, **options)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
