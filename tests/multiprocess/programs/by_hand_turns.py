"""What a user would write without hpctrain for two losses, and for two groups of parameters."""

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
from tests.multiprocess.programs.rivals import Pair, critic_loss, generator_loss
from tests.multiprocess.programs.trial import network, table


def rank_batches(rank, size, *, samples, steps, batch, micro):
    """The features and labels of one rank's micro-batches, step by step."""
    features, labels, _ = table(samples)
    for step in range(steps):
        begin = step % (samples // batch) * batch
        order = ShuffledOrder(samples, 0)(step // (samples // batch), np.arange(begin, begin + batch))
        pieces = map(torch.from_numpy, np.split(order, batch // micro)[rank::size])
        yield [(features[piece], labels[piece]) for piece in pieces]


def turns(rank, size, *, order, every, kind, **data):
    """Two losses: of the critic and of the generator, in this order or the other one."""
    torch.manual_seed(0)
    pair = Pair()
    wrapped = {"critic": pair.critic, "generator": pair.generator}
    if size > 1:
        wrapped = {name: DistributedDataParallel(module) for name, module in wrapped.items()}
    optimizers = {
        "critic": torch.optim.Adam(pair.critic.parameters(), lr=0.01),
        "generator": torch.optim.SGD(pair.generator.parameters(), lr=0.02, momentum=0.5),
    }
    torch.manual_seed(rank_seed(0, rank))
    for step, batches in enumerate(rank_batches(rank, size, **data)):
        for name in order:
            if (step + 1) % every[name]:
                continue
            pair.critic.requires_grad_(name == "critic")
            pair.generator.requires_grad_(name == "generator")
            loss_of = critic_loss if name == "critic" else generator_loss
            parts = {"generator": pair.generator, "critic": pair.critic, name: wrapped[name]}
            for number, (real, _) in enumerate(batches, 1):
                with wrapped[name].no_sync() if size > 1 and number < len(batches) else contextlib.nullcontext():
                    with torch.autocast("cpu", torch.bfloat16) if kind == "bf16" else contextlib.nullcontext():
                        loss = loss_of(parts["generator"], parts["critic"], real)
                    (loss / len(batches)).backward()
            if name == "critic":
                torch.nn.utils.clip_grad_norm_(pair.critic.parameters(), 0.05)
            else:
                rate = 0.02 * 0.5 * (1 + math.cos(math.pi * step / (data["steps"] - 1)))
                optimizers[name].param_groups[0]["lr"] = rate
            optimizers[name].step()
            optimizers[name].zero_grad()
    return pair


def groups(rank, size, *, kind, **data):
    """Two groups, one of them with a tenth of the learning rate and without weight decay."""
    torch.manual_seed(0)
    inside = network()
    model = DistributedDataParallel(inside) if size > 1 else inside
    rest = [parameter for name, parameter in inside.named_parameters() if not name.startswith("0.")]
    slow = {"params": list(inside[0].parameters()), "lr": 0.01 * 0.1, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": rest}, slow], lr=0.01)
    torch.manual_seed(rank_seed(0, rank))
    for batches in rank_batches(rank, size, **data):
        for number, (features, labels) in enumerate(batches, 1):
            with model.no_sync() if size > 1 and number < len(batches) else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16) if kind == "bf16" else contextlib.nullcontext():
                    loss = cross_entropy(model(features), labels)
                (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return inside


def main(path, rank, size, what, options):
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    model = {"turns": turns, "groups": groups}[what](rank, size, **options)
    if rank == 0:
        torch.save(model.state_dict(), path)
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
