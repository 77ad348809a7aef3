"""Ranks of a mesh that save a model by themselves, some of them with a mistake, and read what was saved."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from hpctrain.checkpoint.read import load_newest
from hpctrain.checkpoint.restore import restore_weights
from hpctrain.checkpoint.sharded import write
from hpctrain.checkpoint.sharded.live_shards import LiveShards
from hpctrain.checkpoint.sharded.write import ShardedSaver, ShardedWriter
from hpctrain.checkpoint.state import Head
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.checkpoint import Checkpoint
from hpctrain.config.mesh import mesh_shape
from hpctrain.config.parallel import Parallel
from hpctrain.parallel.fsdp import shard_model
from hpctrain.parallel.local_part import whole
from hpctrain.parallel.mesh import join_mesh
from hpctrain.rank.rendezvous import meet
from hpctrain.rank.stop_request import StopRequest
from hpctrain.rank.world import join
from hpctrain.run.checkpoints import list_checkpoints
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Claim, Ledger


class Tied(nn.Module):
    """Has a tied weight, a buffer, a frozen parameter, one of a single row, and a state that isn't a tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.few = nn.Parameter(torch.randn(1, 6))
        self.fixed = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.register_buffer("count", torch.tensor([3.0]))

    def forward(self, numbers):
        found = self.embedding(numbers) + self.few + self.fixed.sum(0)
        for layer in self.layers:
            found = layer(found).relu()
        return self.head(found)

    def get_extra_state(self):
        return "a word"

    def set_extra_state(self, state):
        assert state == "a word"


class Unreadable(dict):
    """A state that can't be copied for want of memory."""

    def items(self):
        raise MemoryError("no memory for a copy")


def meet_others(**degrees):
    environment = ClusterEnvironment.from_environment(os.environ)
    store = meet(environment, init_method="env://", secret=b"s" * 32, token=str(environment.master_port), timeout_s=30)
    parallel = Parallel(kind="mesh", **degrees)
    shape = mesh_shape(parallel, environment.world_size, environment.local_world_size)
    cpu = (torch.device("cpu"),)
    world = join_mesh(join(environment, store, backend="gloo", devices=cpu, timeout_s=30), shape, 30)
    torch.set_num_threads(1)
    return world, parallel


def trained(world, parallel, *, steps=2, seed=0):
    """A sharded model after some steps, and its optimizer."""
    torch.manual_seed(seed)
    model = Tied()
    root = shard_model(model, world.mesh, parallel)
    root.fix_sharding()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    for _ in range(steps):
        root(lambda called: called(torch.arange(10)).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def live(model, optimizer, world, step, known=None, **extra):
    head = Head(step=step, samples_seen=step, world_size=world.size, config_digest="digest")
    known = {} if known is None else known
    return LiveShards(
        model, {"": optimizer}, head=head, rng=["rng"] * world.size, extra=extra, world=world, part_cache=known
    )


def contents(model, optimizer):
    """Everything that is saved, whole; collective."""
    found = {name: whole(value.detach()).clone() for name, value in model.named_parameters(remove_duplicate=False)}
    found |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"{number} {key}": whole(value).clone() for key, value in state.items()}
    return found


def save(folder, options):
    """Save, and leave beside it what a reader has to find."""
    steps = options.pop("steps", 2)
    world, parallel = meet_others(**options)
    directory = RunDirectory.at(Path(folder))
    if world.is_rank_zero:
        directory.path.mkdir(exist_ok=True)
    model, optimizer = trained(world, parallel, steps=steps)
    expected = contents(model, optimizer)
    writer = ShardedWriter(directory, Claim(Ledger(directory), 1), world, num_files=2)
    known = {}
    live(model, optimizer, world, 1, known).capture()
    with patch("hpctrain.checkpoint.sharded.live_shards.local_pieces", side_effect=AssertionError("computed again")):
        snapshot = live(model, optimizer, world, 2, known).capture()
        writer.write(snapshot)
    size = writer.size_of(snapshot)
    if world.is_rank_zero:
        torch.save(expected, Path(folder, "expected.pt"))
    world.close()
    return {"size": size}


def restore(folder, options):
    """Restore into a model and an optimizer with other values."""
    world, parallel = meet_others(**options)
    directory = RunDirectory.at(Path(folder))
    expected = torch.load(Path(folder, "expected.pt"), weights_only=True)
    model, optimizer = trained(world, parallel, seed=5)
    found = load_newest(directory, world)
    restore_weights(found.states, model, {"": optimizer})
    wrong = [name for name, value in contents(model, optimizer).items() if not torch.equal(value, expected[name])]
    world.close()
    return {"wrong": wrong, "rng": found.state["rng"], "step": found.step}


def save_with_mistake(folder, rank, kind, background, options):
    """Rank ``rank`` fails in the second of three saves; print what each rank's `save` and `finish` raised."""
    world, parallel = meet_others(**options)
    directory = RunDirectory.at(Path(folder))
    if world.is_rank_zero:
        (directory.path / "attempts").mkdir(parents=True)
        claim = Claim(Ledger(directory), Ledger(directory).claim())
    else:
        claim = Claim(Ledger(directory), 1)
    model, optimizer = trained(world, parallel)
    stop = StopRequest()
    policy = Checkpoint(asynchronous=background)
    saver = ShardedSaver(directory, claim, policy, stop, world=world)
    raised = []
    write_chunks = write.write_chunks
    for step in (1, 2, 3):
        extra = {}
        if step == 2 and world.rank == rank:
            if kind == "state":
                optimizer.state[next(iter(optimizer.state))]["odd"] = object()
            elif kind == "memory":
                extra["ema"] = {"few": Unreadable()}
            elif kind == "disk":

                def full(path, chunks):
                    raise OSError(28, "No space left on device")

                write.write_chunks = full
            elif kind == "superseded":
                Ledger(directory).claim()
        try:
            saver.save(live(model, optimizer, world, step, **extra), wait=False)
            saver.finish()
        except Exception as error:
            raised.append([step, f"{type(error).__name__}: {error}"])
        if kind == "state":
            optimizer.state[next(iter(optimizer.state))].pop("odd", None)
        write.write_chunks = write_chunks
        world.barrier()
    steps = [info.step for info in list_checkpoints(directory) if info.intact]
    left = sorted(path.name for path in directory.checkpoints.iterdir() if path.name.startswith(".tmp"))
    world.close()
    return {"raised": raised, "steps": steps, "left": left}
