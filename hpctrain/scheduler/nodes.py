"""Nodes that failed, from what SLURM says of them."""

from __future__ import annotations

import re

_FIELD = re.compile(r"(?:^|\s)(NodeName|State|SlurmdStartTime)=(\S*)")
_LOST = {
    "DOWN",
    "FAIL",
    "FAILING",
    "NOT_RESPONDING",
    "NO_RESPOND",
    "POWERED_DOWN",
    "REBOOT",
    "REBOOT_ISSUED",
    "UNKNOWN",
}
"""Words of a node's state, joined by `+`, for a node that is gone or was given up."""


def failed(answer: str, since: float) -> tuple[str, ...]:
    """The nodes that are down, or whose slurmd has started after a moment: they died meanwhile and came back.

    Args:
        answer: of `scontrol --oneliner show node`, with times in seconds since the epoch.
        since: epoch seconds.
    """
    found = []
    for line in answer.splitlines():
        fields = dict(_FIELD.findall(line))
        started = fields.get("SlurmdStartTime", "")
        lost = set(fields.get("State", "").rstrip("*").split("+")) & _LOST or fields.get("State", "").endswith("*")
        if "NodeName" in fields and (lost or (started.isdigit() and int(started) > since)):
            found.append(fields["NodeName"])
    return tuple(found)
