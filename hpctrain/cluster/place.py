"""The place of one process in the world of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process stands among the ranks, and where rank zero is found."""

    rank: int
    """In the world: 0 to world_size - 1."""
    local_rank: int
    """On this node: 0 to local_world_size - 1."""
    node_rank: int
    """Of this node: 0 to num_nodes - 1."""
    world_size: int
    """Number of ranks on all nodes."""
    local_world_size: int
    """Number of ranks on this node; nodes may differ."""
    num_nodes: int
    """Number of nodes that hold ranks."""
    master_addr: str
    """Host name or address of rank zero's node, as the other nodes reach it."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes, node rank 0 first, where they are known."""


def is_loopback(address: str) -> bool:
    """Whether an address reaches only the node itself."""
    return address in {"localhost", "::1"} or address.startswith("127.")
