"""Ranks of a mesh that build a model, for a new run and for a resume, and compare it with that of an ordinary build."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hpctrain.config.stored import load
from hpctrain.parallel.local_part import local_part
from hpctrain.parallel.sharded_tensor import local_pieces
from hpctrain.rank.determinism import seed_everything
from hpctrain.run.directory import RunDirectory
from hpctrain.train.build import build_model, build_trained_task
from hpctrain.train.training import build
from tests.multiprocess.programs.sharded_saves import meet_others
from tests.multiprocess.programs.trial import Trial, network


class Kept(nn.Module):
    """Has tensors that no checkpoint holds, a tied weight, and a number that it draws and reads."""

    def __init__(self, reads):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.network = network(batchnorm=True)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.rand(3, 5), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.rand(3)).conj(), persistent=False)
        self.drawn = float(torch.rand(())) if reads else 0.0


class Keeping(Trial):
    """Builds it."""

    def __init__(self, reads=False):
        super().__init__()
        self.reads = reads

    def build_model(self):
        return Kept(self.reads)

    def loss(self, model, batch):
        return super().loss(model.network, batch)


def compare(path, degrees):
    """Return the names of what differs, in a new run and in a resume, and of what a checkpoint holds."""
    world, _ = meet_others(**degrees)
    config = load(RunDirectory.at(Path(path)).config)
    seed_everything(config.seed)
    task = build_trained_task(config)
    task.train_dataset()
    model = build_model(config.model, task)
    after = torch.get_rng_state()
    torch.use_deterministic_algorithms(True)  # memory that nothing has written to contains NaN
    differing = []
    for resumes in (False, True):
        training = build(config, world, resumes=resumes)
        names = ["the random state"] * (not torch.equal(torch.get_rng_state(), after))
        names += ["the number"] * (getattr(model, "drawn", None) != getattr(training.module, "drawn", None))
        tensors = _tensors(training.module)
        names += [name for name, value in _tensors(model).items() if not _same(tensors[name], value)]
        differing.append(names)
    saved = list(training.module.state_dict())
    world.close()
    return {"new": differing[0], "resumed": differing[1], "saved": saved}


def _tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _same(value, whole):
    """Whether a rank's part, if it has one, is that of a whole tensor."""
    own = local_part(value.detach())
    return own.is_meta or all(
        torch.equal(own[piece.place.slices()], whole[piece.region.slices()].to(own.dtype))
        for piece in local_pieces(value)
    )
