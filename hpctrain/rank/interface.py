"""The network interface by which a node's ranks reach those of other nodes."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping, Sequence
from contextlib import suppress

import psutil

from hpctrain.phrases import either

_ANY_PORT = 9
"""To connect a UDP socket chooses a route, and sends nothing."""

log = logging.getLogger("hpctrain.train")


def choose_interface(
    name: str | None, nodes: Sequence[str] = (), variables: MutableMapping[str, str] | None = None
) -> None:
    """Have gloo and NCCL use a network interface, unless the user exported another.

    gloo listens at the address to which the node's own name resolves. Where that is the loopback, as Debian's installer
    writes it into /etc/hosts, gloo gets the interface that leads to the other nodes. NCCL never uses the loopback.

    Args:
        name: of the interface; None: they choose.
        nodes: names or addresses of the nodes; this one may be among them.
        variables: the environment to change; None for this process's.
    """
    environ = os.environ if variables is None else variables
    if name is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
        environ.setdefault("NCCL_SOCKET_IFNAME", name)
    elif nodes and "GLOO_SOCKET_IFNAME" not in environ and (address := own_address()).startswith("127."):
        names = sorted(interfaces_to(nodes))
        if len(names) == 1:
            environ["GLOO_SOCKET_IFNAME"] = names[0]
            return
        log.warning(
            "this node's own name, %s, resolves to %s, which other nodes can't reach: set cluster.network_interface to "
            "the interface that connects the nodes%s",
            *(socket.gethostname(), address, f": {either(names)}" if names else ""),
        )


def own_address() -> str:
    """The address to which this node's name resolves, at which gloo listens unless it is given an interface.

    Empty if the name can't be resolved.
    """
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return ""


def interfaces_to(nodes: Sequence[str]) -> set[str]:
    """The names of the interfaces that lead to other nodes; nodes whose names can't be resolved are passed over."""
    addresses = set()
    for node in nodes:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((node, _ANY_PORT))
            addresses.add(probe.getsockname()[0])
    return {name for name, address in interface_addresses().items() if address in addresses}


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface except the loopback, by name; empty without one."""
    return {
        name: next((address.address for address in addresses if address.family == socket.AF_INET), "")
        for name, addresses in psutil.net_if_addrs().items()
        if name != "lo"
    }
