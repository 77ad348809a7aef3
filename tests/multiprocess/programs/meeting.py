"""Ranks that meet, and strangers at their ports."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from pathlib import Path

from torch._C._distributed_c10d import FileStore, TCPStore

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import RendezvousError
from hpctrain.rank.private_folder import private_folder
from hpctrain.rank.rendezvous import meet
from hpctrain.rank.sealed_store import Handshake
from hpctrain.run.temporary_folder import first_part

WAITS_FOR_REPLACEMENT = {"read_after_s": 2.0}
"""Options of a rank that reads so late that an intruder was faster."""


def be_rank(rank, size, ports, options):
    """Meet, then hear from every rank; returns the port and what was heard, or the error and how long it took.

    Each rank takes itself to be on a node of its own, unless `num_nodes` is among the options; `folder` is for
    temporary files, and `addresses` are where rank zero may be.
    """
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    environment = ClusterEnvironment.from_environment({name: str(value) for name, value in place.items()})
    num_nodes = options.get("num_nodes", size)
    addresses = tuple(options.get("addresses", environment.address_candidates))
    changes = {"port_candidates": tuple(ports), "num_nodes": num_nodes, "address_candidates": addresses}
    environment = dataclasses.replace(environment, **changes)
    tempfile.tempdir = options.get("folder")
    options = {name: value for name, value in options.items() if name not in {"num_nodes", "folder", "addresses"}}
    options = {"init_method": "env://", "secret": "s", "token": "t", "timeout_s": 30.0, "delay_s": 0.0} | options
    time.sleep(options.pop("delay_s"))
    pause_s = options.pop("read_after_s", 0.0)
    began = time.monotonic()
    try:
        store = meet(environment, **options | {"secret": options["secret"].encode()})
        store.set(f"rank {rank}", f"hello from {rank}")
        time.sleep(pause_s)
        heard = [store.get(f"rank {other}").decode() for other in range(size)]
        store.add("left", 1)
        if rank == 0:
            while store.add("left", 0) < size:  # the store is served here: the others must have their answer
                time.sleep(0.01)
        return {"port": getattr(store.inner, "port", None), "heard": heard}
    except RendezvousError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}


def crash(path):
    """Rank zero of an earlier attempt that met alone at a file, and died."""
    environment = ClusterEnvironment.from_environment({})
    store = meet(environment, init_method=f"file://{path}", secret=b"s", token="1", timeout_s=5.0)
    store.set("rank 0", "a ghost")
    store.set("rank 1", "a ghost")
    os._exit(0)


def leave_folder(folder, token):
    """Rank zero of an earlier attempt on one machine, which was killed while it waited for the other ranks."""
    handshake = Handshake(b"s", token)
    with private_folder(Path(folder, f"{first_part()}{handshake.name}")) as file:
        handshake.announce(FileStore(f"/proc/self/fd/{file}", 2))
        os._exit(0)


def serve(port, secret, until):
    """Another run's rank zero, until there is a file of that name."""
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    if secret is not None:
        Handshake(secret.encode(), "t").announce(store)
    while not Path(until).exists():
        time.sleep(0.02)
