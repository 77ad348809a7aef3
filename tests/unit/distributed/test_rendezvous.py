from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hpctrain.distributed.rendezvous import probe

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
