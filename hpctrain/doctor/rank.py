"""One rank of the doctor's job: ``python -m hpctrain.doctor.rank FOLDER``.

The doctor's only module that imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hpctrain.cluster.environment import ClusterEnvironment, cpu_cores, cpu_threads
from hpctrain.config.root import Config
from hpctrain.config.stored import load
from hpctrain.doctor.folder import GPU_FIELDS, DoctorFolder, from_json
from hpctrain.doctor.measurements import Pair, pair_rounds, suspicious_pairs
from hpctrain.errors import ExitCode, HpctrainError, error_text
from hpctrain.files import errors_naming, write_json
from hpctrain.rank.determinism import random_states_restored
from hpctrain.rank.devices import RankDevices, choose_devices, require_compatible_devices
from hpctrain.rank.interface import choose_interface, interface_addresses, own_address
from hpctrain.rank.rendezvous import meet
from hpctrain.rank.world import World, join
from hpctrain.run.directory import umask_of
from hpctrain.run.secret import read_secret
from hpctrain.streams import LogHandler
from hpctrain.train.build import build_model, build_trained_task
from hpctrain.train.initial_values import build_without_values

MEETING_S = 90.0
MEETING_S_EACH = 0.1
"""Seconds for the rendezvous, and more for each rank: on a busy file system, some import torch long after others."""
COLLECTIVE_S = 40.0
"""Bound in seconds on each collective."""
COPIES = 3
"""The weights, and two states of the optimizer of the same size, as AdamW has; other optimizers have fewer."""
TRIED_S = 0.4
"""Seconds for which multiplications are repeated; the best one counts, since others may share the cores."""
CHUNK_BYTES = 4 << 20
MOST_BYTES = 32 << 20
LONGEST_S = 5.0
SHARE_OF_FREE = 8
"""At most this fraction of the free space is written, by all nodes together."""
SMI_S = 20.0
"""Seconds for nvidia-smi, which waits for a driver that no longer answers."""
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

log = logging.getLogger("hpctrain.doctor")


class RankLog:
    """A rank's results so far, written at each stage, so that they also show where a rank hangs.

    Args:
        folder: of the examination.
        rank: in the world.
        facts: values to begin with, of JSON's types.
    """

    def __init__(self, folder: DoctorFolder, rank: int, facts: dict[str, Any]) -> None:
        self._path = folder.rank(rank)
        self._values: dict[str, Any] = {"rank": rank, "stage": "", **facts}

    def add(self, **values: Any) -> None:
        """Add values of JSON's types, such as the `stage` that begins, as the end of "it stopped while ..."."""
        self._values |= values
        # the next stage may still succeed, and the command notices that a record is missing
        with contextlib.suppress(OSError):
            write_json(self._path, self._values, durable=False)


def main(path: Path, environ: Mapping[str, str]) -> int:
    """Run one rank; return its exit code."""
    folder = DoctorFolder(path)
    config = load(folder.request)
    # as a run does: they choose the network, among other things
    os.environ.update(config.cluster.env)
    os.umask(umask_of(config.mode))
    environment = ClusterEnvironment.from_environment(environ, master_port=config.cluster.master_port)
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    place = {"node": node, "local_rank": environment.local_rank, "node_rank": environment.node_rank}
    record = RankLog(folder, environment.rank, place)
    record.add(stage="starting")
    try:
        _measure(folder, config, environment, record)
    except Exception as error:
        log.exception("the rank failed")
        text = error_text(error) if isinstance(error, HpctrainError) else f"{type(error).__name__}: {error_text(error)}"
        record.add(error=text, traceback="".join(traceback.format_exception(error)))
        return ExitCode.FAILED
    return ExitCode.FINISHED


def _measure(folder: DoctorFolder, config: Config, environment: ClusterEnvironment, record: RankLog) -> None:
    cluster = config.cluster
    threads = cpu_threads(environment, cluster.cpus_per_process, os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
    is_leader = environment.local_rank == 0
    record.add(
        stage="choosing its devices", torch=torch.__version__, own_address=own_address(), interfaces=interfaces()
    )
    devices = choose_devices(environment, cluster.gpus_per_process, use_gpu=bool(cluster.node_gpus))
    record.add(stage="looking for the other ranks", devices=list(map(str, devices)))
    world = _join(folder, config, environment, devices)
    record.add(stage="measuring its device", met=True)
    record.add(stage="asking nvidia-smi", flops_per_s=flops_per_s(world.device))
    # after the rendezvous, since it may take seconds for each GPU
    gpu_report = smi_report() if is_leader else {}
    world.barrier()
    record.add(stage="writing to the disk", **gpu_report)
    disk_rate = None
    if is_leader:
        name = f"speed_{environment.node_rank}"
        disk_rate = write_bytes_per_s(folder.nodes, name, writers=environment.num_nodes)
    record.add(stage="exchanging messages with other nodes", write_bytes_per_s=disk_rate)
    measured = _over_the_network(world, environment, record)
    if world.is_rank_zero:
        write_json(folder.measured, measured)
    world.close()
    if world.is_rank_zero:
        # last, since the task may do anything, such as download data
        record.add(stage="building the task")
        write_json(folder.measured, {**measured, **_checkpoint(config)})
    record.add(stage="done")


def _join(
    folder: DoctorFolder, config: Config, environment: ClusterEnvironment, devices: tuple[torch.device, ...]
) -> World:
    choose_interface(config.cluster.network_interface, environment.node_addresses)
    store = None
    if environment.world_size > 1:
        secret = read_secret(folder.path)
        init_method = config.parallel.init_method
        timeout_s = MEETING_S + MEETING_S_EACH * environment.world_size
        store = meet(environment, init_method=init_method, secret=secret, token=environment.token, timeout_s=timeout_s)
        report = RankDevices.of(environment.rank, devices, {})
        require_compatible_devices(store, report, environment.world_size, config.parallel.backend)
    return join(
        environment,
        store,
        backend=config.parallel.backend,
        devices=devices,
        cores=cpu_cores(environment, config.cluster.cpus_per_process),
        timeout_s=COLLECTIVE_S,
    )


def _over_the_network(world: World, environment: ClusterEnvironment, record: RankLog) -> dict[str, Any]:
    """Measure what needs several ranks; collective. The pairs are known at rank zero alone."""
    if world.size == 1:
        return {"pairs": [], "reductions": []}
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    places = world.broadcast(world.gather([environment.node_rank, environment.local_rank, world.rank, node]))
    leaders = [(rank, name) for _, local_rank, rank, name in sorted(places) if local_rank == 0]
    pairs = measure_pairs(world, leaders, lambda peer: record.add(stage=f"exchanging messages with {peer}"))
    record.add(stage="reducing tensors with all ranks")
    return {"pairs": [asdict(pair) for pair in pairs], "reductions": measure_reductions(world)}


def _checkpoint(config: Config) -> dict[str, Any]:
    try:
        return {"checkpoint_bytes": checkpoint_bytes(config)}
    except Exception as error:  # whatever a task raises: a run shows it better
        log.warning("the size of a checkpoint isn't known: %s", error_text(error))
        return {"checkpoint_bytes": None}


def checkpoint_bytes(config: Config) -> int:
    """About how many bytes a checkpoint takes: the weights, and two states of the optimizer for each.

    The model is built without the memory for its weights, if torch's meta device can build it.

    Args:
        config: of a training.

    Raises:
        Exception: whatever the task raises.
    """
    with random_states_restored([]):
        task = build_trained_task(config)
        model = build_without_values(lambda: build_model(config.model, task))
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return COPIES * sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def flops_per_s(device: torch.device) -> float:
    """The best rate of a few matrix multiplications, in floating-point operations per second.

    Small ones on a CPU, so that some of them aren't interrupted by another process; bfloat16 on a GPU.
    """
    size, dtype = (256, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    torch.mm(matrix, matrix, out=product)  # the first one loads libraries
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    best, end = float("inf"), time.perf_counter() + TRIED_S
    while time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(matrix, matrix, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def write_bytes_per_s(folder: Path, name: str, *, writers: int = 1) -> float:
    """Write a file and fsync it, twice; return the bytes per second of the faster one.

    At most `MOST_BYTES` are written, for about `LONGEST_S` at most; the file is removed.

    Args:
        folder: on the file system.
        name: of the file, another one for each node.
        writers: nodes that write at the same time.

    Raises:
        OSError: the file system's error.
    """
    return max(_write_rate(folder, name, writers) for _ in range(2))


def _write_rate(folder: Path, name: str, writers: int) -> float:
    system = os.statvfs(folder)
    max_bytes = min(MOST_BYTES, system.f_bavail * system.f_frsize // (SHARE_OF_FREE * writers))
    chunk = os.urandom(min(CHUNK_BYTES, max(1, max_bytes)))  # random, since some file systems compress
    path = folder / name
    begin, num_bytes = time.perf_counter(), 0
    try:
        with errors_naming(path), path.open("wb", buffering=0) as file:
            while num_bytes < max_bytes and time.perf_counter() - begin < LONGEST_S:
                num_bytes += file.write(chunk) or 0
            os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)


def parse_smi(answer: str) -> list[dict[str, str]]:
    """Parse the output of `nvidia-smi --query-gpu=... --format=csv,noheader`: a record per GPU."""
    rows = ([cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip())
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def smi_report() -> dict[str, Any]:
    """Return nvidia-smi's report on this node: `gpus`, or `smi_problem` if it fails; empty where it isn't installed."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=False)
    except FileNotFoundError:
        return {}
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"smi_problem": str(error)}
    if done.returncode:
        return {"smi_problem": " ".join((done.stdout + done.stderr).split())[:400]}
    return {"gpus": parse_smi(done.stdout)}


def interfaces() -> list[dict[str, Any]]:
    """The interfaces except the loopback: name, IPv4 address (empty without one) and speed in Mbit/s (0 if unknown)."""
    speeds: dict[str, int] = {}
    with contextlib.suppress(OSError):  # a sandbox may forbid the call
        speeds = {name: stats.speed for name, stats in psutil.net_if_stats().items()}
    return [
        {"name": name, "address": address, "mbit_per_s": speeds.get(name, 0)}
        for name, address in interface_addresses().items()
    ]


def measure_pairs(world: World, leaders: Sequence[tuple[int, str]], report: Callable[[str], None]) -> list[Pair]:
    """Measure all pairs of nodes; collective over all ranks. The result is at rank zero, empty elsewhere.

    In a round, each node has at most one partner. Slow pairs are measured again, one at a time.

    Args:
        world: the ranks; a group of gloo carries the messages.
        leaders: a rank of each node, and the node's name.
        report: gets the name of a node before messages are exchanged with it.
    """
    pairs = _gather_pairs(world, [_measure_round(world, pairs, leaders, report) for pairs in pair_rounds(len(leaders))])
    slow = world.broadcast([[pair.first, pair.second] for pair in suspicious_pairs(pairs)[:MOST_REPEATED]])
    index = {node: number for number, (_, node) in enumerate(leaders)}
    again = [_measure_round(world, [(index[first], index[second])], leaders, report) for first, second in slow]
    better = {pair.nodes: pair for pair in _gather_pairs(world, again)}
    return [pair.best_of(better.get(pair.nodes)) for pair in pairs]


def _gather_pairs(world: World, halves: Sequence[dict[str, Any] | None]) -> list[Pair]:
    gathered = world.gather([half for half in halves if half is not None]) or []
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for half in chain.from_iterable(gathered):
        records.setdefault((half["first"], half["second"]), {}).update(half)
    return [from_json(Pair, record) for record in records.values()]


def _measure_round(
    world: World, pairs: Sequence[tuple[int, int]], leaders: Sequence[tuple[int, str]], report: Callable[[str], None]
) -> dict[str, Any] | None:
    """Measure a round; return this rank's half of what is known of its pair, if it has one."""
    half = None
    for (first, first_node), (second, second_node) in ((leaders[a], leaders[b]) for a, b in pairs):
        if world.rank == first:
            report(second_node)
            half = {"first": first_node, "second": second_node, **_drive(world, second)}
        elif world.rank == second:
            report(first_node)
            half = {"first": first_node, "second": second_node, **_echo(world, first)}
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
    """Return a peer's messages until it announces that there are no more."""
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
    num_sent, num_repeated = (after - earlier for after, earlier in zip(segments(), before, strict=True))
    return {f"{side}_sent": num_sent, f"{side}_repeated": num_repeated}


def segments(statistics_file: Path = Path("/proc/net/snmp")) -> tuple[int, int]:
    """Return the TCP segments that this node has sent, and those that it sent again; 0 if the kernel has no counts.

    proc(5), /proc/net/snmp. InfiniBand, and other networks that bypass the kernel, aren't counted.
    """
    try:
        names, values = (line.split() for line in statistics_file.read_text().splitlines() if line.startswith("Tcp:"))
        counters = dict(zip(names, values, strict=True))
        return int(counters["OutSegs"]), int(counters["RetransSegs"])
    except (OSError, ValueError, KeyError):
        return 0, 0


def measure_reductions(world: World) -> list[dict[str, Any]]:
    """Time all-reduces over all ranks, over gloo and, on GPUs, over NCCL; collective.

    Returns:
        For each size: `backend`, `bytes`, `seconds` of the best one.
    """
    reductions = []
    groups = {"gloo": (world.control, torch.device("cpu"))}
    if world.backend == "nccl":
        groups["nccl"] = (None, world.device)
    for backend, (group, device) in groups.items():
        for size in REDUCED_BYTES:
            data = torch.zeros(max(1, size // 4), device=device)
            seconds = min(_reduce(data, group) for _ in range(1 + (20 if size < 1024 else REPEATS)))
            seconds = float(world.broadcast(seconds))
            reductions.append({"backend": backend, "bytes": size, "seconds": seconds})
            if seconds > SLOW_REDUCE_S:
                break
    return reductions


def _reduce(data: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    begin = time.perf_counter()
    dist.all_reduce(data, group=group)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)
    return time.perf_counter() - begin


if __name__ == "__main__":
    logging.basicConfig(handlers=[LogHandler(sys.stdout)], level=logging.INFO, format="%(asctime)s %(message)s")
    code = main(Path(sys.argv[1]), os.environ)
    sys.stdout.flush()
    os._exit(code)  # a thread of gloo or NCCL may keep a rank that failed
