"""The network: a node's interfaces, the links between nodes, pair by pair, and collectives over all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hpctrain.doctor.pairs import Pair, pair_rounds, suspicious
from hpctrain.rank.interface import interface_addresses
from hpctrain.rank.world import World

PINGS = 100
SIZES = (1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Bytes of the messages, each larger than the one before; a slow network gets no further than the first ones."""
LONG_ENOUGH_S = 0.1
"""A message that takes this long shows the bandwidth, and a larger one isn't sent."""
REPEATS = 3
PACED_BYTES = 1 << 14
PACED_COUNT = 200
PACE_S = 1e-3
"""Losses are counted while messages of this size are sent, with a pause between them: at full speed a healthy link
loses packets as well, where a busy receiver can't take them in time."""
MOST_REPEATED = 16
"""Pairs that are measured again, one at a time, because they were slow."""
REDUCED_BYTES = (4, 1 << 20, 25 << 20)
"""Sizes of all-reduces; the last one is that of DDP's buckets."""
SLOW_REDUCE_S = 0.3
"""After an all-reduce that takes this long, a larger one isn't measured."""


def interfaces() -> list[dict[str, Any]]:
    """The interfaces except the loopback: name, IPv4 address (empty without one) and speed in Mbit/s (0 if unknown)."""
    speeds: dict[str, int] = {}
    with suppress(OSError):  # a sandbox may forbid the call
        speeds = {name: stats.speed for name, stats in psutil.net_if_stats().items()}
    return [
        {"name": name, "address": address, "mbit_per_s": speeds.get(name, 0)}
        for name, address in interface_addresses().items()
    ]


def measure_pairs(
    world: World, leaders: Sequence[int], nodes: Sequence[str], report: Callable[[str], None]
) -> list[Pair]:
    """Measure all pairs of nodes; collective over all ranks. The result is at rank zero, empty elsewhere.

    In a round, each node has at most one partner. Slow pairs are measured again, one at a time.

    Args:
        world: the ranks; a group of gloo carries the messages.
        leaders: a rank of each node.
        nodes: their names.
        report: gets the name of a node before messages are exchanged with it.
    """
    rounds = pair_rounds(len(leaders))
    own = [_measure(world, pairs, leaders, nodes, report) for pairs in rounds]
    found = _gathered(world, own)
    wanted = world.broadcast([[pair.first, pair.second] for pair in suspicious(found)[:MOST_REPEATED]])
    index = {node: number for number, node in enumerate(nodes)}
    again = [_measure(world, [(index[first], index[second])], leaders, nodes, report) for first, second in wanted]
    better = {(pair.first, pair.second): pair for pair in _gathered(world, again)}
    return [pair.best_of(better.get((pair.first, pair.second))) for pair in found]


def _gathered(world: World, own: Sequence[dict[str, Any] | None]) -> list[Pair]:
    halves = world.gather([half for half in own if half is not None]) or []
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for half in (one for ranks in halves for one in ranks):
        joined.setdefault((half["first"], half["second"]), {}).update(half)
    return [Pair.from_record(record) for record in joined.values()]


def _measure(
    world: World,
    pairs: Sequence[tuple[int, int]],
    leaders: Sequence[int],
    nodes: Sequence[str],
    report: Callable[[str], None],
) -> dict[str, Any] | None:
    """Measure a round; return this rank's half of what is known of its pair, if it has one."""
    half = None
    for first, second in pairs:
        if world.rank in (leaders[first], leaders[second]):
            is_first = world.rank == leaders[first]
            peer = second if is_first else first
            report(nodes[peer])
            found = _drive(world, leaders[peer]) if is_first else _echo(world, leaders[peer])
            half = {"first": nodes[first], "second": nodes[second], **found}
    world.barrier()
    return half


def _drive(world: World, peer: int) -> dict[str, float]:
    """Send messages to a peer that returns them."""
    pings = _exchange(world, peer, 1, PINGS)
    before = segments()
    _exchange(world, peer, PACED_BYTES, PACED_COUNT, pause_s=PACE_S)
    losses = _losses("first", before)
    seconds, size = 0.0, 1
    for size in SIZES:
        seconds = min(_exchange(world, peer, size, 1))
        if seconds > LONG_ENOUGH_S:
            break
    else:
        seconds = min(seconds, *_exchange(world, peer, size, REPEATS))
    _exchange(world, peer, 0, 0)
    rate = 2 * size / seconds
    return {"latency_s": statistics.median(pings) / 2, "best_latency_s": min(pings) / 2, "bytes_per_s": rate, **losses}


def _exchange(world: World, peer: int, size: int, count: int, *, pause_s: float = 0.0) -> list[float]:
    """Send a message there and back ``count`` times; return the seconds of each. Size 0 ends the peer's part."""
    dist.send(torch.tensor([size, count]), peer, group=world.control)
    message = torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        dist.send(message, peer, group=world.control)
        dist.recv(message, peer, group=world.control)
        times.append(time.perf_counter() - begin)
        time.sleep(pause_s)
    return times


def _echo(world: World, peer: int) -> dict[str, float]:
    """Return a peer's messages until it says that there are no more."""
    losses: dict[str, float] = {}
    while True:
        announced = torch.zeros(2, dtype=torch.int64)
        dist.recv(announced, peer, group=world.control)
        size, count = announced.tolist()
        if not size:
            return losses
        before = segments()
        message = torch.zeros(size, dtype=torch.uint8)
        for _ in range(count):
            dist.recv(message, peer, group=world.control)
            dist.send(message, peer, group=world.control)
        if size == PACED_BYTES:
            losses = _losses("second", before)


def _losses(side: str, before: tuple[int, int]) -> dict[str, float]:
    sent, repeated = (after - earlier for after, earlier in zip(segments(), before, strict=True))
    return {f"{side}_sent": sent, f"{side}_repeated": repeated}


def segments(statistics_file: Path = Path("/proc/net/snmp")) -> tuple[int, int]:
    """The TCP segments that this node has sent, and those that it had to send again; 0 where the kernel doesn't tell.

    proc(5), /proc/net/snmp.
    """
    try:
        names, values = (line.split() for line in statistics_file.read_text().splitlines() if line.startswith("Tcp:"))
        found = dict(zip(names, values, strict=True))
        return int(found["OutSegs"]), int(found["RetransSegs"])
    except (OSError, ValueError, KeyError):
        return 0, 0


def measure_reductions(world: World) -> list[dict[str, Any]]:
    """Time all-reduces over all ranks, over gloo and, on GPUs, over NCCL; collective.

    Returns:
        For each size: `backend`, `bytes`, `seconds` of the best one.
    """
    found = []
    groups = {"gloo": (world.control, torch.device("cpu"))}
    if world.backend == "nccl":
        groups["nccl"] = (None, world.device)
    for backend, (group, device) in groups.items():
        for size in REDUCED_BYTES:
            data = torch.zeros(max(1, size // 4), device=device)
            seconds = min(_reduce(data, group) for _ in range(1 + (20 if size < 1024 else REPEATS)))
            seconds = float(world.broadcast(seconds))
            found.append({"backend": backend, "bytes": size, "seconds": seconds})
            if seconds > SLOW_REDUCE_S:
                break
    return found


def _reduce(data: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    begin = time.perf_counter()
    dist.all_reduce(data, group=group)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    return time.perf_counter() - begin
