"""The network between the machines: one bridge, in the controller's namespace, where no firewall of the host sees it.

The host itself gets a single link into it, so that `sbatch` and `srun` reach the controller and the nodes.
"""

from __future__ import annotations

import json
import subprocess

from home import CONTROLLER, Record
from machine import Machine
from problem import SandboxError


def connect_host(record: Record, controller: Machine) -> None:
    """Make the bridge and the host's link to it."""
    link = record.link
    _ip(
        [],
        f"link add {link} address {record.mac('host')} type veth peer name host netns {controller.pid}",
        f"address add {record.address('host')}/24 dev {link}",
        f"link set {link} up",
    )
    _ip(
        controller.network_command(),
        f"link add bridge address {record.mac(CONTROLLER)} type bridge",
        f"address add {record.address(CONTROLLER)}/24 dev bridge",
        "link set bridge up",
        "link set host master bridge up",
    )


def connect(record: Record, controller: Machine, node: Machine) -> None:
    """Put a node on the bridge."""
    name = node.name
    _ip(
        controller.network_command(),
        f"link add {name} type veth peer name eth0 address {record.mac(name)} netns {node.pid}",
        f"link set {name} master bridge up",
    )
    _ip(node.network_command(), f"address add {record.address(name)}/24 dev eth0", "link set eth0 up")


def cut(controller: Machine, node: str) -> None:
    """Pull the node's cable; its processes live on."""
    _ip(controller.network_command(), f"link set {node} down")


def mend(controller: Machine, node: str) -> None:
    """Plug the node's cable in."""
    _ip(controller.network_command(), f"link set {node} up")


def connected(controller: Machine) -> set[str]:
    """The nodes whose cables are plugged in."""
    shown = subprocess.run(
        controller.network_command("ip", "-json", "link", "show", "up"), capture_output=True, text=True, check=True
    )
    return {link["ifname"] for link in json.loads(shown.stdout) if link}  # a link that is down is an empty record


def disconnect(controller: Machine, node: str) -> None:
    """Take the node's cable away for good; the kernel may have done so already, with the node."""
    subprocess.run(controller.network_command("ip", "link", "delete", node), capture_output=True, check=False)


def disconnect_host(record: Record) -> None:
    """Remove the host's link, if the controller's end has not taken it along."""
    subprocess.run(["ip", "link", "delete", record.link], capture_output=True, check=False)


def _ip(prefix: list[str], *commands: str) -> None:
    done = subprocess.run(
        [*prefix, "ip", "-batch", "-"], input="\n".join(commands), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SandboxError(f"ip: {done.stderr.strip()}; the commands were:\n  " + "\n  ".join(commands))
