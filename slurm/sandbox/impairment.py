"""What the kernel's traffic control makes wrong with a node's link: it is slow, or loses packets.

Both ends of the link have the fault, so both directions do. A node that is revived has a new link, which is whole.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from machine import Machine
from problem import SandboxError

RANDOM_WORD = 2**32 - 0x1000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM of linux/filter.h


@dataclass(frozen=True)
class Impairment:
    """What is wrong with a link.

    Attributes:
        mbit: Mbit/s that it carries in each direction; 0 where it is not slow.
        percent: Share of the packets that it loses in each direction; 0 where it is not lossy.
    """

    mbit: float = 0
    percent: float = 0

    def __str__(self) -> str:
        slow = [f"slow ({self.mbit:g} Mbit/s)"] if self.mbit else []
        lossy = [f"lossy ({self.percent:.3g} %)"] if self.percent else []
        return " and ".join([*slow, *lossy])


def slow(controller: Machine, node: Machine, mbit: float) -> None:
    """Let the link carry only so much in each direction.

    Raises:
        SandboxError: This kernel can't.
    """
    burst_kb = max(32, round(mbit))  # with less than a tick of the kernel's clock brings, the link is slower still
    queue_kb = max(512, round(25 * mbit))  # 200 ms at 20 Mbit/s; with 50 ms, a slow link loses packets too
    tbf = f"tbf rate {mbit}mbit burst {burst_kb}kb limit {queue_kb}kb"
    _impair(controller, node, "root", f"qdisc add dev DEVICE root {tbf}")


def lose(controller: Machine, node: Machine, percent: float) -> None:
    """Let the link lose a share of its packets in each direction, at random.

    They are dropped where they arrive. On its own side the sender's kernel would see that, send the packet again later,
    and not count it as a retransmission. What TCP hands over at once, up to 64 KB, is lost as a whole.

    Raises:
        SandboxError: This kernel can't.
    """
    add = "filter add dev DEVICE ingress protocol all bpf direct-action bytecode"
    _impair(controller, node, "clsact", "qdisc add dev DEVICE clsact", f"{add} '{_program(percent)}'")


def remove(controller: Machine, node: Machine) -> None:
    """Make the link whole again."""
    for qdisc in ("root", "clsact"):
        _delete(controller, node, qdisc)


def find(controller: Machine) -> dict[str, Impairment]:
    """What is wrong with links, by the name of the node; nodes whose link is whole are left out."""
    mbits, percents = {}, {}
    for qdisc in _show(controller, "qdisc", "show"):
        node = qdisc["dev"]
        if qdisc["kind"] == "tbf":
            mbits[node] = qdisc["options"]["rate"] * 8 / 1e6
        elif qdisc["kind"] == "clsact":
            for each in _show(controller, "filter", "show", "dev", node, "ingress"):
                if "options" in each:  # the first entry describes the kind of filter, and has none
                    percents[node] = each["options"]["bytecode"]["insns"][1]["k"] / 2**32 * 100
    return {node: Impairment(mbits.get(node, 0), percents.get(node, 0)) for node in sorted({*mbits, *percents})}


def _program(percent: float) -> str:
    """A filter that drops a share of what it sees, in classic BPF: netem does the same, but not every kernel has it.

    An instruction is its code, how many to skip if a comparison holds, how many if not, and its operand.
    """
    instructions = [
        f"32 0 0 {RANDOM_WORD}",
        f"53 1 0 {round(percent / 100 * 2**32)}",  # as large or larger: skip one
        "6 0 0 2",  # return TC_ACT_SHOT
        "6 0 0 0",  # return TC_ACT_OK
    ]
    return ",".join([str(len(instructions)), *instructions])


def _impair(controller: Machine, node: Machine, qdisc: str, *commands: str) -> None:
    """Give both ends this qdisc in place of one that is there; neither has one where the kernel refuses."""
    _delete(controller, node, qdisc)
    try:
        for end, device in _ends(controller, node):
            _tc(end, *(command.replace("DEVICE", device) for command in commands))
    except SandboxError:
        _delete(controller, node, qdisc)
        raise


def _delete(controller: Machine, node: Machine, qdisc: str) -> None:
    """Take the qdisc from both ends; the kernel refuses where there is none."""
    for end, device in _ends(controller, node):
        subprocess.run(
            end.network_command("tc", "qdisc", "delete", "dev", device, qdisc), capture_output=True, check=False
        )


def _ends(controller: Machine, node: Machine) -> list[tuple[Machine, str]]:
    return [(controller, node.name), (node, "eth0")]


def _show(machine: Machine, *argv: str) -> list[dict[str, Any]]:
    command = machine.network_command("tc", "-json", *argv)
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _tc(machine: Machine, *commands: str) -> None:
    command = machine.network_command("tc", "-batch", "-")
    done = subprocess.run(command, input="\n".join(commands), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SandboxError(f"tc can't do this to the link of a node here: {' '.join(done.stderr.split())}")
