"""The network interfaces of a node."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915
"""The request for an interface's IPv4 address (netdevice(7))."""


def interfaces(classes: Path = Path("/sys/class/net")) -> list[dict[str, Any]]:
    """The interfaces except the loopback: name, IPv4 address (empty without one) and speed in Mbit/s (0 if unknown).

    Args:
        classes: where the kernel lists them.
    """
    found = []
    for _, name in socket.if_nameindex():
        if name != "lo":
            found.append({"name": name, "address": _address(name), "mbit_per_s": _speed(classes / name / "speed")})
    return found


def own_address() -> str:
    """The address to which this node's name resolves, at which gloo listens unless it is given an interface.

    Empty if the name can't be resolved.
    """
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def _address(name: str) -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def _speed(path: Path) -> int:
    # the kernel refuses to read it for an interface that is down, and says -1 for a virtual one
    with suppress(OSError, ValueError):
        return max(0, int(path.read_text()))
    return 0
