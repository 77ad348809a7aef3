"""Models that are built in ways that a deferred build has to follow."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hpctrain.models.convnet import ConvNet
from hpctrain.models.gpt import GPT
from hpctrain.models.mlp import MLP
from hpctrain.models.resnet import ResNet
from hpctrain.train.deferred_tape import COPIED_BYTES


class Holding(nn.Module):
    """Parameters, modules and buffers by name."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, nn.Parameter | nn.Module):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part, persistent=False)


def initialised():
    kinds = [
        nn.init.orthogonal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        nn.init.eye_,
        nn.init.ones_,
        lambda weight: nn.init.sparse_(weight, 0.3),
        lambda weight: nn.init.constant_(weight, 0.3),
        # two ways of rejecting samples, of which each reads how many are left
        lambda weight: nn.init.trunc_normal_(weight, std=0.9),
        lambda weight: nn.init.trunc_normal_(weight, mean=3.0, std=0.5),
        lambda weight: nn.init.normal_(weight.data[2:7, ::2].T),
    ]
    weights = nn.ParameterList(torch.empty(12, 10) for _ in kinds)
    for kind, weight in zip(kinds, weights, strict=True):
        nn.init.uniform_(weight)
        kind(weight)
    return nn.ModuleList([weights, nn.ParameterList([nn.init.dirac_(torch.empty(4, 4, 3))])])


def drawn():
    own = torch.Generator().manual_seed(7)
    chances = torch.rand(20)
    return Holding(
        a=torch.bernoulli(chances),
        b=torch.multinomial(chances, 5),
        c=torch.poisson(chances * 10),
        d=torch.normal(chances, chances),
        e=torch.randperm(20),
        f=torch.empty(7).exponential_(),
        g=torch.empty(64, 64).T.normal_(),
        h=nn.functional.dropout(chances),
        i=nn.functional.rrelu(chances - 0.5, training=True, inplace=True),
        j=torch.randn(9, generator=own),
        k=torch.empty(30).normal_(generator=own),
        l=torch.randperm(5, generator=own),
        m=torch.from_numpy(np.random.rand(3)) + random.random(),
    )


def seeded():
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = torch.randn(4)
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        other = torch.randn(4)
    return Holding(first=first, same=torch.randn(4), other=other, after=torch.randn(4))


def rebound():
    linear = nn.Linear(3, 4)
    other = torch.randn(4, 3)
    linear.weight.data = other
    linear.weight.data[1:3].zero_()
    other[0] += 1
    return linear


def indexed():
    weight = nn.Parameter(torch.randn(5, 5))
    with torch.no_grad():
        weight[0] = 3.5
        weight[1, 2] = torch.tensor(7.0)
        weight[[2, 3]] = 1.25
        weight[np.array([1, 2]), [0, 1]] = 8.0
        weight[weight > 3] *= -1
        weight[torch.arange(2)] += 2
    return Holding(weight=weight, positive=weight.data[weight.data > 0], places=weight.data.nonzero())


def reading():
    noise = torch.randn(3)
    if (noise > 0).any() and bool(noise.max() > -9) and 3.0 not in noise:
        noise.mul_(float(noise[1])).add_(int(noise[0] * 5)).sub_(len(f"{noise[0]:.3f} {noise}"))
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
    return Holding(noise=noise, rates=torch.tensor([*rates, *noise.tolist()]), two=torch.tensor([noise[0], noise[1]]))


def claiming():
    weight = torch.randn(3)
    assert weight.device == torch.device("cpu")
    assert weight.is_cpu
    assert not weight.is_meta
    same = weight.to("cpu").cpu().to(torch.ones(1))
    same[0] = 5
    made = [weight.new_tensor([1, 2]), weight.new([3]), torch.full((2,), 2.5, device=weight.device)]
    return Holding(weight=weight, made=torch.cat(made))


def typed():
    torch.set_default_dtype(torch.float64)
    wide = Holding(linear=nn.Linear(2, 3), places=torch.arange(3) / 2)
    torch.set_default_dtype(torch.float32)
    return Holding(wide=wide, narrow=nn.Linear(3, 4).half(), twice=nn.Linear(3, 4).bfloat16().float())


def copied():
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    copies = [copy.deepcopy(block) for _ in range(3)]
    with torch.no_grad():
        block[0].weight.mul_(2)
        copies[2][0].weight.add_(1)
    return nn.ModuleList([block, *copies])


def tied():
    model = Holding(tokens=nn.Embedding(10, 4, padding_idx=3), out=nn.Linear(4, 10, bias=False))
    model.out.weight = model.tokens.weight
    nn.init.normal_(model.out.weight)
    return model


def flat():
    memory = torch.empty(20).normal_()
    model = Holding(one=nn.Parameter(memory[:8].view(2, 4)), other=nn.Parameter(memory[8:]))
    with torch.no_grad():
        model.one.zero_()
    memory.add_(1)
    return model


def rotary():
    angles = torch.outer(torch.arange(32).float(), 1.0 / (10000 ** (torch.arange(0, 16, 2).float() / 16)))
    turns = torch.polar(torch.ones_like(angles), angles)
    return Holding(cos=angles.cos(), sin=angles.sin(), turns=turns, back=turns.conj(), imaginary=turns.conj().imag)


def with_data():
    array = np.random.randn(4, 4)
    large = torch.from_numpy(np.ones(COPIED_BYTES, np.float32))
    model = Holding(weight=torch.zeros(4, 4), large=torch.zeros(COPIED_BYTES), given=torch.tensor([1.0, 2.0]))
    model.weight.copy_(torch.from_numpy(array))
    model.large.copy_(large)
    array[:] = 0
    large.fill_(4)
    return model


def measured():
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    size = features(torch.randn(2, 1, 8, 8)).shape[1]
    features.eval()(torch.zeros(1, 1, 8, 8))
    with torch.no_grad():
        state, _ = nn.LSTM(4, 5)(torch.randn(3, 2, 4))
    return Holding(features=features, head=nn.Linear(size, 3), state=state, norm=torch.linalg.svdvals(torch.eye(5) + 1))


def from_meta():
    with torch.device("meta"):
        linear = nn.Linear(3, 4)
    assert linear.weight.is_meta
    linear = linear.to_empty(device="cpu")
    linear.reset_parameters()
    skipped = nn.utils.skip_init(nn.Linear, 4, 2)
    skipped.reset_parameters()
    return nn.ModuleList([linear, skipped])


MODELS = {
    "gpt": lambda: GPT(num_layers=2),
    "mlp": MLP,
    "resnet": lambda: ResNet(depth=18, num_classes=3),
    "convnet": ConvNet,
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
    "embedding": lambda: nn.Embedding(10, 4, padding_idx=2),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(5, 6)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 6)),
    **{
        build.__name__: build
        for build in (
            claiming, copied, drawn, flat, from_meta, indexed, initialised, measured, reading, rebound, rotary, seeded,
            tied, typed, with_data,
        )
    },
}  # fmt: skip
