"""Ranks that send each other messages."""

from __future__ import annotations

import importlib
import os
import pickle

import torch

from hpctrain.checkpoint.rng import rng_state
from hpctrain.errors import RendezvousError
from hpctrain.rank import world as world_module
from tests.multiprocess.programs.gloo_world import joined


def be_rank():
    """Gather and broadcast; returns what arrived."""
    world = joined()
    torch.manual_seed(world.rank)
    states = world.gather(rng_state())
    gathered = world.gather(["x" * 1000 * world.rank, world.rank, None])
    torch.manual_seed(1)
    alike = states is None or torch.equal(states[1]["torch"], torch.get_rng_state())
    sent = world.broadcast({"from": world.rank, "text": "ä" * 5})
    world.close()
    lengths = None if gathered is None else [[len(text), rank, nothing] for text, rank, nothing in gathered]
    return {"gathered": lengths, "alike": alike, "sent": sent}


def be_rank_with_device_group():
    """Join with a default group that isn't gloo's; returns what was gathered, and which values no rank has sealed."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # in place of NCCL

    # on a port, where others can list the keys
    world = joined(backend="fake", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}")
    gathered, unsealed, used = world.gather(world.rank), [], 0
    for key in world.store.inner.list_keys():
        if not key.startswith("hpctrain/"):
            used += 1
            try:
                world.store.get(key)
            except RendezvousError:
                unsealed.append(key)
    world.barrier()
    return {"gathered": gathered, "used": used > 0, "unsealed": unsealed}


class Evil:
    """A pickle that writes a file when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def be_betrayed(path):
    """Rank one sends a pickle in place of its message; returns rank zero's error."""
    world = joined()
    if world.rank == 1:
        world_module.encode = lambda value: torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        world.gather(Evil(path))
        return {}
    try:
        return {"opened": str(world.gather("mine"))}
    except ValueError as error:
        return {"error": str(error)}
