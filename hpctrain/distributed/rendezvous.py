"""How the ranks find each other: a key-value store at rank zero, on the first of several ports that is free."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import RendezvousError

TOKEN_KEY = "hpctrain/token"
HANDSHAKE_S = 5.0
"""Bound on one connection to a candidate port; a stranger may listen there and never answer."""
PAUSE_S = 0.05
CHOSEN_PORT_SPARES = 5
"""Ports that are tried from a chosen one on."""


def meet(environment: ClusterEnvironment, *, init_method: str, token: str, timeout_s: float) -> Store:
    """Open the store that all ranks of this attempt share; collective.

    With `env://`, rank zero listens on the first free one of the environment's candidate ports and leaves a token
    there; the other ranks try the candidates in turn and stay where they find it, so that a port in use, by another
    run even, costs a moment and not the run. So is torchrun's own store: it would keep what ranks that were restarted
    have left there, and no number of the restart is known to all nodes.

    Args:
        environment: this rank's place.
        init_method: `env://`, `tcp://HOST:PORT` or `file:///PATH`.
        token: the same for all ranks of an attempt, and different for other runs.
        timeout_s: bound in seconds on the meeting, and afterwards on every wait for a key.

    Raises:
        RendezvousError: no rank zero was found in time, or it could not listen anywhere.
    """
    url = urlsplit(init_method)
    if url.scheme == "file":
        path = Path(url.path).with_name(f"{Path(url.path).name}.{token or 'hpctrain'}")
        return FileStore(str(path), environment.world_size)
    address, ports = environment.master_addr, environment.port_candidates
    if url.scheme == "tcp":
        assert url.hostname is not None
        assert url.port is not None
        address, ports = url.hostname, (url.port,)
    elif len(ports) == 1:
        # a chosen port may be in use all the same; the token tells whose store answers
        ports = tuple(port for port in range(ports[0], ports[0] + CHOSEN_PORT_SPARES) if port < 65536)
    if environment.rank == 0:
        return _listen(address, ports, token, timeout_s)
    return _connect(address, ports, token, timeout_s)


def _listen(address: str, ports: Sequence[int], token: str, timeout_s: float) -> Store:
    for port in ports:
        try:
            store = TCPStore(
                address, port, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except DistNetworkError as error:
            if "EADDRINUSE" in str(error) or "already in use" in str(error):
                continue
            raise RendezvousError(f"rank zero can't open its store at {address}:{port}: {error}") from error
        store.set(TOKEN_KEY, token)
        return store
    raise RendezvousError(
        f"rank zero found none of its ports free on {address}: {', '.join(map(str, ports))}; "
        "set cluster.master_port to a free one, or leave it out to have several tried"
    )


def _connect(address: str, ports: Sequence[int], token: str, timeout_s: float) -> Store:
    deadline = time.monotonic() + timeout_s
    problem, strangers = "nothing listens there yet", ""
    while time.monotonic() < deadline:
        for port in ports:
            try:
                probe(address, port)
            except OSError as error:
                problem = str(error)
                continue
            store = _try_store(address, port, token)
            if store is not None:
                store.set_timeout(timedelta(seconds=timeout_s))
                return store
            strangers = f"what listens on port {port} is not this run's rank zero"
        time.sleep(PAUSE_S)
    problem = strangers or problem
    raise RendezvousError(
        f"rank zero did not answer at {address}, ports {', '.join(map(str, ports))}, in {timeout_s:.0f} s ({problem}); "
        "see its log first; if it waits as well, set cluster.network_interface to a network that joins the nodes",
        waited=True,
    )


def probe(address: str, port: int, *, own_port: int | None = None) -> None:
    """Find out whether something listens there.

    Args:
        address: a host's.
        port: there.
        own_port: to connect from; None: the kernel chooses one.

    Raises:
        OSError: nothing does, or it can't be reached.
    """
    source = None if own_port is None else (address, own_port)
    with socket.create_connection((address, port), HANDSHAKE_S, source) as connection:
        # the kernel may choose that very port where nothing listens on it, and both ends are this one (RFC 9293, 3.5)
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _try_store(address: str, port: int, token: str) -> Store | None:
    """The store there if it holds the token; TCPStore itself would wait for ever for a stranger's first word."""
    found: list[Store] = []

    def attempt() -> None:
        with contextlib.suppress(DistNetworkError, DistStoreError):
            timeout = timedelta(seconds=HANDSHAKE_S)
            store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
            if store.check([TOKEN_KEY]) and store.get(TOKEN_KEY) == token.encode():
                found.append(store)

    thread = threading.Thread(target=attempt, name="rendezvous", daemon=True)
    thread.start()
    thread.join(HANDSHAKE_S)
    return found[0] if found else None


def choose_interface(name: str | None) -> None:
    """Have gloo and NCCL use this network interface; what the user exported stands."""
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
