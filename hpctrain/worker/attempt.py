"""One attempt on one rank: meet the others, join them, train, leave."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TextIO

import torch
from torch._C._distributed_c10d import Store

from hpctrain.config.cluster import Slurm
from hpctrain.config.cross import check_batch, refuse_without_gpu
from hpctrain.config.root import Config
from hpctrain.data.shared_memory import clear_left_behind
from hpctrain.distributed.compiler import spare_compiler
from hpctrain.distributed.determinism import set_determinism
from hpctrain.distributed.rendezvous import choose_interface, meet
from hpctrain.distributed.world import World, choose_devices, cpu_cores, cpu_threads, join
from hpctrain.errors import RunDirectoryError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.ledger import Ledger
from hpctrain.run.owner import Owner
from hpctrain.run.reason import Reason
from hpctrain.train.stopping import Departure
from hpctrain.train.trainer import Trainer
from hpctrain.worker.by_hand import close_silent_by_hand
from hpctrain.worker.rank import Rank

DIRECTORY_KEY = "hpctrain/run_dir"
ATTEMPT_KEY = "hpctrain/attempt"
TOLD_KEY = "hpctrain/told"
TOLD_WITHIN_S = 60.0
"""Seconds that rank zero waits for the others to hear that there is no run to train."""

DETERMINISM_COSTS = (
    "trainer.deterministic=true: cuDNN tries out no faster algorithms, some operations take slower ones, and those "
    "without a deterministic one raise"
)

log = logging.getLogger("hpctrain.train")


def run_attempt(rank: Rank, make_directory: Callable[[], RunDirectory] | None) -> Reason:
    """Train as part of the world; collective.

    Args:
        rank: this rank; what becomes known is noted in it.
        make_directory: makes the run directory, on rank zero; None where it is there.

    Returns:
        `completed`, or why the ranks stopped.
    """
    rank.times.enter("rendezvous_s")
    config, environment = rank.config, rank.environment
    spare_compiler()
    check_batch(config, environment.world_size)
    threads = cpu_threads(environment, config.cluster.cpus_per_process, os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
    store = _meet(rank)
    _learn_directory(rank, store, make_directory)
    directory, attempt = _directory(rank)
    log_stream = None if rank.handover.logged else _log_to_file(directory, environment.rank)
    set_determinism(config.trainer.deterministic)
    world = rank.world = _join(rank, store)
    if world.local_rank == 0:
        clear_left_behind()
    departure = Departure(world, environment)
    ledger = Ledger(directory)
    hosts = world.gather(socket.gethostname())
    if hosts is not None:
        rank.times.keep_in(directory.claim(attempt))
    rank.times.enter("build_s")
    rank.trainer = Trainer(
        config,
        directory,
        world,
        rank.stop,
        lambda: ledger.require_ownership(attempt),
        departure=departure,
        times=rank.times,
        log_stream=log_stream,
    )
    if hosts is not None:
        _record_start(rank, ledger, attempt, hosts)
        rank.trainer.log_start(attempt, hosts)
    finished = rank.trainer.run()
    world.close()
    return Reason.COMPLETED if finished else departure.reason


def _meet(rank: Rank) -> Store | None:
    config, environment = rank.config, rank.environment
    choose_interface(config.cluster.network_interface)
    if environment.world_size == 1:
        return None
    token = rank.handover.token or environment.token
    patience_s = config.health.meeting_timeout_s
    return meet(environment, init_method=config.parallel.init_method, token=token, timeout_s=patience_s)


def _join(rank: Rank, store: Store | None) -> World:
    config, devices = rank.config, devices_of(rank)
    return join(
        rank.environment,
        store,
        backend=config.parallel.backend,
        device=devices[0],
        devices=devices,
        cores=cpu_cores(rank.environment, config.cluster.cpus_per_process, os.environ),
        timeout_s=config.health.collective_timeout_s,
    )


def devices_of(rank: Rank) -> tuple[torch.device, ...]:
    """Where this rank computes: the GPUs that its configuration asks for, as far as torch finds any.

    Raises:
        ConfigError: it finds none, and the configuration can't do without.
    """
    cluster = rank.config.cluster
    asked = cluster.gpus_per_node
    # a SLURM job that asked for no GPU leaves alone those that it happens to see
    use_gpu = asked != 0 and not (asked is None and isinstance(cluster, Slurm))
    each = None if rank.config.parallel.kind == "data_parallel" else cluster.gpus_per_process
    devices = choose_devices(rank.environment, each, use_gpu=use_gpu)
    if devices[0].type == "cpu":
        _refuse_without_gpu(rank.config)
    elif rank.config.trainer.deterministic and rank.environment.rank == 0:
        log.warning(DETERMINISM_COSTS)
    return devices


def _record_start(rank: Rank, ledger: Ledger, attempt: int, hosts: list[str]) -> None:
    environment, trainer = rank.environment, rank.trainer
    assert trainer is not None
    ledger.require_ownership(attempt)
    ledger.start(
        attempt,
        job_id=environment.job_id,
        nodes=list(dict.fromkeys(hosts)),
        world_size=environment.world_size,
        step=trainer.step,
        restart_count=environment.restart_count,
        total_steps=trainer.total_steps,
        launched=rank.times.launched,
        **rank.times.spent(),
    )


def _refuse_without_gpu(config: Config) -> None:
    host = socket.gethostname()
    refuse_without_gpu(config, f"see why torch finds none on {host} (nvidia-smi)")
    if config.cluster.gpus_per_node:
        log.warning("torch finds none of the %d GPUs on %s: the CPU trains", config.cluster.gpus_per_node, host)


def _learn_directory(rank: Rank, store: Store | None, make: Callable[[], RunDirectory] | None) -> None:
    try:
        if rank.environment.rank == 0:
            if rank.directory is None:
                assert make is not None
                rank.directory = make()
            rank.attempt = rank.handover.attempt
            if rank.attempt is None:
                close_silent_by_hand(rank.directory, rank.environment)
                rank.attempt = Ledger(rank.directory).claim()
                if rank.environment.job_id is None:
                    Owner.write(rank.directory.claim(rank.attempt))
    except Exception as error:
        if store is not None:
            _tell_that_there_is_none(store, str(error), rank.environment.world_size - 1)
        raise
    if store is None:
        return
    if rank.environment.rank == 0:
        store.set(DIRECTORY_KEY, str(rank.directory.path) if rank.directory else "")
        store.set(ATTEMPT_KEY, str(rank.attempt))
        return
    path, attempt = store.get(DIRECTORY_KEY).decode(), store.get(ATTEMPT_KEY).decode()
    if not path:
        store.add(TOLD_KEY, 1)
        raise RunDirectoryError(attempt)
    rank.directory, rank.attempt = RunDirectory.existing(path), int(attempt)


def _tell_that_there_is_none(store: Store, why: str, others: int) -> None:
    store.set(DIRECTORY_KEY, "")
    store.set(ATTEMPT_KEY, why)
    deadline = time.monotonic() + TOLD_WITHIN_S
    # the store ends with this process, and a rank that comes later would look for it until its patience is over
    while store.add(TOLD_KEY, 0) < others and time.monotonic() < deadline:
        time.sleep(0.05)


def _directory(rank: Rank) -> tuple[RunDirectory, int]:
    assert rank.directory is not None
    assert rank.attempt is not None
    return rank.directory, rank.attempt


def _log_to_file(directory: RunDirectory, rank: int) -> TextIO:
    handler = logging.FileHandler(directory.rank_log(rank))
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logging.getLogger("hpctrain").addHandler(handler)
    assert handler.stream is not None  # it is opened at once unless it is told to delay
    return handler.stream
