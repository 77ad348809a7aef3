from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.errors import RendezvousError
from hpctrain.rank.classification import Classification, classify
from hpctrain.rank.rendezvous import meet, open_private_store, probe
from hpctrain.rank.sealed_store import Handshake, SealedStore
from hpctrain.run.reason import Reason

ADDRESS = "127.0.11.7"
"""An address of this machine that nothing else listens on or connects from."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        yield listener


def test_a_listener_is_reached(listener: socket.socket) -> None:
    listener.listen()
    probe(ADDRESS, listener.getsockname()[1])


def test_a_port_where_nothing_listens_is_refused(listener: socket.socket) -> None:
    with pytest.raises(ConnectionRefusedError):
        probe(ADDRESS, listener.getsockname()[1])


def test_a_connection_to_itself_is_refused(listener: socket.socket) -> None:
    """The kernel chooses from the ports that a probe may go to, and so may choose the one that it goes to."""
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(ConnectionRefusedError, match="Connection refused"):
        probe(ADDRESS, port, own_port=port)


PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_a_file_that_cant_be_opened_in_time(tmp_path: Path) -> None:
    """torch's FileStore would retry for 300 s, without letting another thread of the process run."""
    began = time.monotonic()
    with pytest.raises(RendezvousError) as raised:
        meet(
            ClusterEnvironment.from_environment(PLACE),
            init_method=f"file://{tmp_path}/a/b",
            secret=b"s",
            token="t",
            timeout_s=0.3,
        )
    assert 0.3 <= time.monotonic() - began < 20
    assert re.fullmatch(
        rf"parallel\.init_method: the store's file {tmp_path}/a/b\.[0-9a-f]{{16}} can't be opened on \S+ "
        r"\(No such file or directory\); name a file in a folder that every node can write to",
        str(raised.value),
    )


def test_a_file_of_the_launcher_that_cant_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError) as raised:
        open_private_store(tmp_path / "a" / "store", 2, 60.0)
    assert str(raised.value) == (
        f"the file {tmp_path}/a/store, where the ranks meet, can't be opened in the launcher's folder (No such file or "
        "directory); set TMPDIR to a folder of this machine that isn't cleaned up during the run"
    )


def test_a_file_in_which_no_other_rank_writes(tmp_path: Path) -> None:
    environment = ClusterEnvironment.from_environment(PLACE)
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank zero did not open the store's file .* in 0 s") as raised:
        meet(environment, init_method=f"file://{tmp_path}/store", secret=b"s", token="t", timeout_s=0.3)
    assert time.monotonic() - began < 20
    assert classify(raised.value, 2) == Classification(Reason.INFRASTRUCTURE, blames_peer=True)


def meet_at(path: Path, rank: int) -> SealedStore:
    place = {**PLACE, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    environment = ClusterEnvironment.from_environment(place)
    return meet(environment, init_method=f"file://{path}", secret=b"s", token="t", timeout_s=20.0)


def start(path: Path) -> tuple[SealedStore, SealedStore]:
    """Both ranks meet, rank one first."""
    found: list[SealedStore] = []
    one = threading.Thread(target=lambda: found.append(meet_at(path, 1)))
    one.start()
    time.sleep(0.1)
    zero = meet_at(path, 0)
    one.join()
    return zero, found[0]


@pytest.mark.parametrize("completed", [True, False])
def test_a_file_that_an_earlier_start_has_left(tmp_path: Path, completed: bool) -> None:
    """It has the same name: ranks that are started by hand have the same secret and token each time."""
    path = tmp_path / "store"
    if completed:
        earlier, _ = start(path)
        earlier.set("a", "of the earlier start")
        earlier.add("n", 1)
    else:  # rank zero was killed while it waited
        handshake = Handshake(b"s", "t")
        earlier_file = FileStore(f"{path}.{handshake.name}", 2)
        handshake.announce(earlier_file)
    zero, one = start(path)
    assert not one.check(["a"])
    zero.set("a", "of this one")
    assert (one.get("a"), one.add("n", 1)) == (b"of this one", 1)
