"""The network interfaces of a node."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.distributed.interface import address_of


def interfaces(classes: Path = Path("/sys/class/net")) -> list[dict[str, Any]]:
    """The interfaces except the loopback: name, IPv4 address (empty without one) and speed in Mbit/s (0 if unknown).

    Args:
        classes: where the kernel lists them.
    """
    found = []
    for _, name in socket.if_nameindex():
        if name != "lo":
            found.append({"name": name, "address": address_of(name), "mbit_per_s": _speed(classes / name / "speed")})
    return found


def _speed(path: Path) -> int:
    # the kernel refuses to read it for an interface that is down, and says -1 for a virtual one
    with suppress(OSError, ValueError):
        return max(0, int(path.read_text()))
    return 0
