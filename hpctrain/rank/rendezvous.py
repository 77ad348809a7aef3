"""The rendezvous of the ranks: a key-value store in a private file, or at rank zero on a port."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import RendezvousError
from hpctrain.phrases import listed
from hpctrain.rank.private_folder import lockable_folder, open_private_file, private_folder
from hpctrain.rank.sealed_store import POLL_S, ZERO_KEY, Handshake, SealedStore, wait_for_key
from hpctrain.run.secret import VARIABLE
from hpctrain.run.temporary_folder import first_part, remove_abandoned

LOOPBACK = "127.0.0.1"
HANDSHAKE_S = 5.0
"""Seconds for one connection to a candidate port: another program may listen there and never answer."""
PAUSE_S = 0.05
"""Seconds between two rounds over the nodes and ports where rank zero may be, or two tries to open a store's file."""
OTHERS_AFTER_S = 1.0
"""Seconds after which a rank tries other nodes than the likeliest: by then, rank zero usually listens there."""
OTHER_NODES = 8
"""How many nodes besides the likeliest a rank tries between two pauses: few, since every rank does so."""
CHOSEN_PORT_SPARES = 5
"""Number of ports to try, starting with the one that the user chose."""
FILE_S = 60.0
"""Seconds in which a store's file has to become usable: an NFS client may take a minute to see a new folder."""
READ_TIMEOUT_S = 60.0
"""Seconds that rank zero waits for the other ranks to read a refusal: the store is gone once rank zero exits."""

OTHER_SECRET = (
    f"if you started the ranks by hand, on nodes without a shared home, set {VARIABLE} to the same value on all ranks"
)
"""What to do if each node has made its own secret."""


def meet(
    environment: ClusterEnvironment, *, init_method: str, secret: bytes, token: str, timeout_s: float
) -> SealedStore:
    """Open the store that all ranks of this attempt share, and find out that they are its ranks; collective.

    With `env://`, ranks of one machine meet at a file, in a folder that rank zero makes and no other user can enter.
    Its name follows from secret and token. Once all ranks have opened the file, rank zero removes it. Every user of the
    machine could connect to a port instead, even to one of the loopback interface.

    On several machines, rank zero listens on the first free one of the environment's candidate ports and proves there
    that it knows the secret. The other ranks try the candidates in turn, on each node that may be rank zero's, and use
    the store with the proof, so that a port in use, even by another run, costs a moment and not the run. torchrun's
    own store isn't used: after a restart it would still hold the keys of the previous ranks, and the nodes don't share
    a restart number. Nor is a file in the run directory, by default: NFS shows new values to other nodes seconds later,
    and gloo waits for dozens of them when it starts.

    Args:
        environment: this rank's place.
        init_method: `env://`, `tcp://HOST:PORT` or `file:///PATH`.
        secret: that only the ranks know, or only their user.
        token: the same for all ranks of an attempt, and different for other runs.
        timeout_s: bound in seconds on the rendezvous, and afterwards on every wait for a key.

    Raises:
        RendezvousError: a rank was not found in time, or rank zero found no port to listen on; or the file can't be
            used.
    """
    deadline = time.monotonic() + timeout_s
    handshake = Handshake(secret, token)
    url = urlsplit(init_method)
    if url.scheme == "file":
        return _meet_at_file(environment, Path(url.path), handshake, timeout_s)
    with ExitStack() as stack:
        store, zero = _open(environment, url, handshake, timeout_s, stack)
        if environment.rank == 0:
            return handshake.welcome(store, zero, range(1, environment.world_size), timeout_s)
        return handshake.introduce(store, zero, environment.rank, deadline - time.monotonic())


def open_private_store(path: Path, world_size: int, timeout_s: float) -> Store:
    """Open the store of ranks that a launcher started on this machine; collective.

    Args:
        path: a file in a folder that only their user may enter.
        world_size: number of ranks.
        timeout_s: bound in seconds on every wait for a key.

    Raises:
        RendezvousError: the file can't be opened.
    """
    try:
        return _file_store(path, world_size, timeout_s)
    except OSError as error:
        raise RendezvousError(
            f"the file {path}, where the ranks meet, can't be opened in the launcher's folder ({error.strerror}); "
            "set TMPDIR to a folder of this machine that isn't cleaned up during the run"
        ) from error


def _meet_at_file(environment: ClusterEnvironment, path: Path, handshake: Handshake, timeout_s: float) -> SealedStore:
    """Meet at a file that an earlier start of the same ranks may have left: each start has its own prefix in it."""
    path = path.with_name(f"{path.name}.{handshake.name}")
    deadline = time.monotonic() + timeout_s
    store = _shared_file_store(path, environment.world_size, timeout_s)
    if environment.rank == 0:
        zero = handshake.announce(store)
        return handshake.welcome(PrefixStore(zero.hex(), store), zero, range(1, environment.world_size), timeout_s)
    while True:
        zero = _wait_for_nonce(store, path, handshake, deadline - time.monotonic())
        is_over = partial(_is_over, store, zero, handshake)
        left_s = deadline - time.monotonic()
        try:
            return handshake.introduce(PrefixStore(zero.hex(), store), zero, environment.rank, left_s, is_over)
        except RendezvousError:
            while not is_over():  # until this start's rank zero begins
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_S)


def _is_over(store: Store, zero: bytes, handshake: Handshake) -> bool:
    return handshake.recognise(store) != zero


def _open(
    environment: ClusterEnvironment, url: SplitResult, handshake: Handshake, timeout_s: float, stack: ExitStack
) -> tuple[Store, bytes]:
    """The store, and rank zero's nonce in it; ``stack`` removes what ranks need only until they have met."""
    is_zero, world_size = environment.rank == 0, environment.world_size
    if url.scheme != "env" or environment.num_nodes > 1:
        return _open_on_port(environment, url, handshake, timeout_s)
    path = Path(lockable_folder() or tempfile.gettempdir()) / f"{first_part()}{handshake.name}"
    try:
        if is_zero:
            remove_abandoned(str(path.parent))
            file = stack.enter_context(private_folder(path))
        else:
            file = _wait_for_file(path, timeout_s)
    except OSError as error:
        raise RendezvousError(
            f"rank {environment.rank} can't use the folder {path}, where the ranks of this machine meet "
            f"({error.strerror}); set TMPDIR to a folder of this machine in which files can be written and locked"
        ) from error
    # by its descriptor: torch opens the file for each access, and its path is removed once all have met
    store = _file_store(Path(f"/proc/self/fd/{file}"), world_size, timeout_s)
    return store, handshake.announce(store) if is_zero else _wait_for_nonce(store, path, handshake, timeout_s)


def _open_on_port(
    environment: ClusterEnvironment, url: SplitResult, handshake: Handshake, timeout_s: float
) -> tuple[Store, bytes]:
    # Derived ports, and not port 0 with its number in a file: on a network file system, the others see that seconds
    # later. Several, since retries of the attempt with one port would all fail where another program keeps it.
    addresses, ports = environment.address_candidates, environment.port_candidates
    if url.scheme == "tcp":
        assert url.hostname is not None
        assert url.port is not None
        addresses, ports = (url.hostname,), (url.port,)
    elif len(ports) == 1:
        # the chosen port may be in use; the proof shows whose store answers
        ports = tuple(port for port in range(ports[0], ports[0] + CHOSEN_PORT_SPARES) if port < 65536)
    if environment.rank == 0:
        store = _listen(addresses[0], ports, timeout_s)
        return store, handshake.announce(store)
    return _connect(addresses, ports, handshake, timeout_s)


def _wait_for_file(path: Path, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (file := open_private_file(path)) is not None:
            return file
        time.sleep(POLL_S)
    raise RendezvousError(
        f"rank zero did not make the folder {path} in {timeout_s:.0f} s; check its log first; if the ranks don't share "
        f"{path.parent}, give all of them the same TMPDIR, or, in containers, set parallel.init_method=tcp://HOST:PORT",
        waited=True,
    )


def _wait_for_nonce(store: Store, path: Path, handshake: Handshake, timeout_s: float) -> bytes:
    try:
        wait_for_key(store, ZERO_KEY, timeout_s)
    except (RuntimeError, TimeoutError) as error:
        raise RendezvousError(
            f"rank zero did not open the store's file {path} in {timeout_s:.0f} s; check its log first; {OTHER_SECRET}",
            waited=True,
        ) from error
    zero = handshake.recognise(store)
    if zero is None:
        raise RendezvousError(f"the store's file {path} is not this run's: remove it")
    return zero


def _shared_file_store(path: Path, world_size: int, timeout_s: float) -> Store:
    deadline = time.monotonic() + min(timeout_s, FILE_S)
    while True:
        try:
            return _file_store(path, world_size, timeout_s)
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"parallel.init_method: the store's file {path} can't be opened on {socket.gethostname()} "
                    f"({error.strerror}); name a file in a folder that every node can write to"
                ) from error
        time.sleep(PAUSE_S)


def _file_store(path: Path, world_size: int, timeout_s: float) -> Store:
    # FileStore retries its first open for 300 s, and holds Python's global lock so that the watchdog can't end it
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    store = FileStore(str(path), world_size)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _listen(address: str, ports: Sequence[int], timeout_s: float) -> Store:
    for port in ports:
        try:
            # by itself, TCPStore listens on all interfaces
            listener = socket.create_server((LOOPBACK, port)).detach() if address == LOOPBACK else None
            return TCPStore(
                address,
                port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        except (DistNetworkError, OSError) as error:
            busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if busy or "EADDRINUSE" in str(error) or "already in use" in str(error):
                continue
            raise RendezvousError(f"rank zero can't open its store at {address}:{port}: {error}") from error
    raise RendezvousError(
        f"rank zero found none of its ports free on {address}: {', '.join(map(str, ports))}; "
        "set cluster.master_port to a free one, or leave it out to try several"
    )


def _connect(
    addresses: Sequence[str], ports: Sequence[int], handshake: Handshake, timeout_s: float
) -> tuple[Store, bytes]:
    began = time.monotonic()
    deadline = began + timeout_s
    likeliest, *other_nodes = addresses
    in_turn = itertools.cycle(other_nodes)
    problem = "nothing listens there yet"
    stranger = ""
    while time.monotonic() < deadline:
        count = min(len(other_nodes), OTHER_NODES) if time.monotonic() - began > OTHERS_AFTER_S else 0
        nodes = (likeliest, *itertools.islice(in_turn, count))
        for address, port in itertools.product(nodes, ports):
            try:
                probe(address, port)
            except OSError as error:
                problem = str(error)
                continue
            connection = _try_store(address, port, handshake)
            if connection is not None:
                connection[0].set_timeout(timedelta(seconds=timeout_s))
                return connection
            stranger = f"the program on port {port} of {address} is not this run's rank zero, or has a different secret"
        time.sleep(PAUSE_S)
    where = f"any of the nodes {listed(addresses)}" if other_nodes else likeliest
    # the network is not to blame if it has carried an answer
    network = "if rank zero is waiting too, set cluster.network_interface to the interface that connects the nodes"
    raise RendezvousError(
        f"rank zero did not answer at {where}, ports {', '.join(map(str, ports))}, in {timeout_s:.0f} s "
        f"({stranger or problem}); check its log first; {OTHER_SECRET if stranger else network}",
        waited=True,
    )


def probe(address: str, port: int, *, own_port: int | None = None) -> None:
    """Connect, to find out whether a program listens on a port.

    Args:
        address: of a host.
        port: on that host.
        own_port: the port to connect from; None: the kernel chooses one.

    Raises:
        OSError: no program listens there, or the host can't be reached.
    """
    source = None if own_port is None else (address, own_port)
    with socket.create_connection((address, port), HANDSHAKE_S, source) as connection:
        # if no program listens, the kernel may choose that same port, and TCP connects to itself (RFC 9293, 3.5)
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _try_store(address: str, port: int, handshake: Handshake) -> tuple[Store, bytes] | None:
    """Connect to the store on a port; return it with rank zero's nonce, if it holds rank zero's proof."""
    stores: list[tuple[Store, bytes]] = []

    def attempt() -> None:
        with contextlib.suppress(DistNetworkError, DistStoreError):
            timeout = timedelta(seconds=HANDSHAKE_S)
            store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
            if (zero := handshake.recognise(store)) is not None:
                stores.append((store, zero))

    # in a thread: TCPStore waits forever for the first answer of a program that listens there and never writes
    thread = threading.Thread(target=attempt, name="rendezvous", daemon=True)
    thread.start()
    thread.join(HANDSHAKE_S)
    return stores[0] if stores else None


def share_refusal(store: Store, topic: str, why: str, num_others: int) -> None:
    """Publish a refusal, as rank zero, and wait until all others have read it; collective with `read_refusal`.

    Args:
        store: that the ranks share.
        topic: what may be refused; each only once.
        why: the refusal; empty if there is none, and then this doesn't wait.
        num_others: number of the other ranks.
    """
    store.set(f"hpctrain/refusal/{topic}", why)
    deadline = time.monotonic() + READ_TIMEOUT_S
    # a rank that arrives after the store is gone would look for it until the rendezvous times out
    while why and store.add(f"hpctrain/refusal_readers/{topic}", 0) < num_others and time.monotonic() < deadline:
        time.sleep(0.05)


def read_refusal(store: Store, topic: str) -> str:
    """Wait for rank zero's decision, and return its refusal, empty without one; collective with `share_refusal`.

    Args:
        store: that the ranks share.
        topic: as rank zero names it.
    """
    why = store.get(f"hpctrain/refusal/{topic}").decode()
    if why:
        store.add(f"hpctrain/refusal_readers/{topic}", 1)
    return why
