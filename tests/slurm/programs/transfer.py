"""A TCP transfer between two nodes: without arguments, receive once; with HOST PORT BYTES, send.

The receiver prints its port. The sender prints the throughput in Mbit/s, and the share of its node's segments that were
sent again meanwhile.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

SO_MAX_PACING_RATE = 47  # of asm-generic/socket.h
BYTES_PER_S = 25_000_000  # at full speed, two cores drop packets of a whole link too


def main() -> None:
    """Receive or send."""
    if len(sys.argv) == 1:
        receive()
    else:
        send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))


def receive() -> None:
    """Take all that one peer sends, and answer when it has ended."""
    with socket.create_server(("", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 16):
                pass
            connection.sendall(b"all")


def send(host: str, port: int, num_bytes: int) -> None:
    """Send so many bytes, and wait for the answer."""
    before = segments()
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, BYTES_PER_S)
        began = time.monotonic()
        connection.sendall(bytes(num_bytes))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(3)
        took_s = time.monotonic() - began
    sent, resent = (now - then for now, then in zip(segments(), before, strict=True))
    print(f"{num_bytes * 8 / took_s / 1e6:.1f} {resent / sent:.5f}")


def segments() -> tuple[int, int]:
    """How many TCP segments this node has sent, and how many of them again."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    counts = dict(zip(names[1:], values[1:], strict=True))
    return int(counts["OutSegs"]), int(counts["RetransSegs"])


if __name__ == "__main__":
    main()
