"""What a user would write without hpctrain for each precision: the loop that its weights are compared with."""

from __future__ import annotations

import contextlib
import copy
import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpctrain.data.order import ShuffledOrder
from hpctrain.rank.determinism import rank_seed
from tests.multiprocess.programs.trial import network, table

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = {"bf16_pure": torch.bfloat16, "fp16_master": torch.float16}


def half_copy(model):
    """The model in fp16 with its batch norms in fp32."""
    half = copy.deepcopy(model).half()
    for module in half.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.float()
    return half


def train(path, rank, size, *, kind, steps, batch, micro, samples=40, scale=65536.0, **options):
    """Train as one rank, and save the weights; how many updates were skipped."""
    torch.manual_seed(0)
    model = network(**options)
    masters = None
    if kind == "bf16_pure":
        model = model.bfloat16()
    if kind == "fp16_master":
        masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        model = half_copy(model)
    inside = model
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(masters or inside.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=kind.startswith("fp16"))
    torch.manual_seed(rank_seed(0, rank))
    skipped = 0
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * (step - skipped) / (steps - 1)))
        begin = step % (samples // batch) * batch
        order = ShuffledOrder(samples, 0)(step // (samples // batch), np.arange(begin, begin + batch))
        backward(model, kind, scaler, np.split(order, batch // micro)[rank::size], table(samples))
        if masters is not None:
            for master, half in zip(masters, inside.parameters(), strict=True):
                master.grad, half.grad = half.grad.float(), None
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
        if masters is not None:
            with torch.no_grad():
                for master, half in zip(masters, inside.parameters(), strict=True):
                    half.copy_(master)
    weights = inside.state_dict()
    if masters is not None:
        weights |= dict(zip((name for name, _ in inside.named_parameters()), masters, strict=True))
    if rank == 0:
        torch.save({name: value.detach() for name, value in weights.items()}, path)
    return skipped


def backward(model, kind, scaler, pieces, data):
    """One rank's part of a step: forward and backward of its micro-batches."""
    features, labels, _ = data
    for number, piece in enumerate(pieces, 1):
        chosen = torch.from_numpy(piece)
        autocast = torch.autocast("cpu", AUTOCAST[kind]) if kind in AUTOCAST else contextlib.nullcontext()
        apart = number < len(pieces) and isinstance(model, DistributedDataParallel)
        with model.no_sync() if apart else contextlib.nullcontext():
            with autocast:
                logits = model(features[chosen].to(WEIGHTS.get(kind, torch.float32)))
                loss = cross_entropy(logits.float() if kind in WEIGHTS else logits, labels[chosen])
            scaler.scale(loss / len(pieces)).backward()


def main(path, rank, size, options):
    skipped = train(path, rank, size, **options)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
    print(f"skipped {skipped}")
