"""One rank of the doctor's job: ``python -m hpctrain.doctor.ranks FOLDER``."""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpctrain.cluster.cpus import cpu_cores, cpu_threads
from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import Config
from hpctrain.config.stored import load
from hpctrain.doctor.folder import DoctorFolder
from hpctrain.doctor.pairs import Pair
from hpctrain.doctor.ranks.checkpoint_size import checkpoint_bytes
from hpctrain.doctor.ranks.compute import flops_per_s
from hpctrain.doctor.ranks.disk import write_bytes_per_s
from hpctrain.doctor.ranks.gpus import smi_report, without_peer_access
from hpctrain.doctor.ranks.network import interfaces, measure_pairs, measure_reductions
from hpctrain.doctor.ranks.record import RankRecord
from hpctrain.errors import ExitCode, HpctrainError, error_text
from hpctrain.files import write_json
from hpctrain.rank.devices import RankDevices, choose_devices, require_compatible_devices
from hpctrain.rank.interface import choose_interface, own_address
from hpctrain.rank.rendezvous import meet
from hpctrain.rank.world import World, join
from hpctrain.run.directory import umask_of
from hpctrain.run.secret import read_secret
from hpctrain.streams import LogHandler

MEETING_S = 90.0
MEETING_S_EACH = 0.1
"""Seconds for the rendezvous, and more for each rank: on a busy file system, some import torch long after others."""
COLLECTIVE_S = 40.0
"""Bound in seconds on each collective."""

log = logging.getLogger("hpctrain.doctor")


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
    record = RankRecord(folder, environment.rank, place)
    record.enter("starting")
    try:
        _measure(folder, config, environment, record)
    except Exception as error:
        log.exception("the rank failed")
        text = error_text(error) if isinstance(error, HpctrainError) else f"{type(error).__name__}: {error_text(error)}"
        record.fail(text, "".join(traceback.format_exception(error)))
        return ExitCode.FAILED
    return ExitCode.FINISHED


def _measure(folder: DoctorFolder, config: Config, environment: ClusterEnvironment, record: RankRecord) -> None:
    cluster = config.cluster
    threads = cpu_threads(environment, cluster.cpus_per_process, os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
    is_leader = environment.local_rank == 0
    record.enter("choosing its devices", torch=torch.__version__, own_address=own_address(), interfaces=interfaces())
    devices = choose_devices(environment, cluster.gpus_per_process, use_gpu=bool(cluster.gpus_per_node))
    record.enter(
        "looking for the other ranks", devices=list(map(str, devices)), no_peer_access=without_peer_access(devices)
    )
    world = _join(folder, config, environment, devices)
    record.enter("measuring its device", met=True)
    record.enter("asking nvidia-smi", flops_per_s=flops_per_s(world.device))
    # after the rendezvous, since it may take seconds for each GPU
    found = smi_report() if is_leader else {}
    world.barrier()
    record.enter("writing to the disk", **found)
    written = None
    if is_leader:
        name = f"speed_{environment.node_rank}"
        written = write_bytes_per_s(folder.nodes, name, writers=environment.num_nodes)
    record.enter("exchanging messages with other nodes", write_bytes_per_s=written)
    measured = _over_the_network(world, environment, record)
    if world.is_rank_zero:
        write_json(folder.measured, measured)
    world.close()
    if world.is_rank_zero:
        # last, since the task may do anything, such as download data
        record.enter("building the task")
        write_json(folder.measured, {**measured, **_checkpoint(config)})
    record.enter("done")


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
        own = RankDevices.of(environment.rank, devices, {})
        require_compatible_devices(store, own, environment.world_size, config.parallel.backend)
    return join(
        environment,
        store,
        backend=config.parallel.backend,
        devices=devices,
        cores=cpu_cores(environment, config.cluster.cpus_per_process),
        timeout_s=COLLECTIVE_S,
    )


def _over_the_network(world: World, environment: ClusterEnvironment, record: RankRecord) -> dict[str, Any]:
    """Measure what needs several ranks; collective. The pairs are known at rank zero alone."""
    if world.size == 1:
        return {"pairs": [], "reductions": []}
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    places = world.broadcast(world.gather([environment.node_rank, environment.local_rank, world.rank, node]))
    leaders = sorted((node_rank, rank, name) for node_rank, local_rank, rank, name in places if local_rank == 0)
    pairs: list[Pair] = []
    if len(leaders) > 1:
        pairs = measure_pairs(
            world,
            [rank for _, rank, _ in leaders],
            [name for _, _, name in leaders],
            lambda peer: record.enter(f"exchanging messages with {peer}"),
        )
    record.enter("reducing tensors with all ranks")
    return {"pairs": [pair.as_record() for pair in pairs], "reductions": measure_reductions(world)}


def _checkpoint(config: Config) -> dict[str, Any]:
    try:
        return {"checkpoint_bytes": checkpoint_bytes(config)}
    except Exception as error:  # whatever a task raises: a run shows it better
        log.warning("the size of a checkpoint isn't known: %s", error_text(error))
        return {"checkpoint_bytes": None}


if __name__ == "__main__":
    logging.basicConfig(handlers=[LogHandler(sys.stdout)], level=logging.INFO, format="%(asctime)s %(message)s")
    code = main(Path(sys.argv[1]), os.environ)
    sys.stdout.flush()
    os._exit(code)  # a thread of gloo or NCCL may keep a rank that failed
