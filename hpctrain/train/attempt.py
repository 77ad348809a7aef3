"""One attempt on one rank: meet the other ranks, join them, train, leave."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch._C._distributed_c10d import Store

from hpctrain.attempt.rank_python import other_torch
from hpctrain.attempt.requeue import next_pause
from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.cluster.environment import cpu_cores, cpu_threads
from hpctrain.config.mesh import data_parallel_size, mesh_shape
from hpctrain.config.resources import check_batch
from hpctrain.errors import RunDirectoryError
from hpctrain.files import read_json_or_empty
from hpctrain.metrics.progress import open_bar
from hpctrain.parallel.mesh import TrainingWorld, join_mesh
from hpctrain.phrases import DATE_TIME
from hpctrain.rank.compiler import spare_compiler
from hpctrain.rank.determinism import set_determinism
from hpctrain.rank.devices import choose_compatible_devices
from hpctrain.rank.interface import choose_interface
from hpctrain.rank.rank import Member, Rank
from hpctrain.rank.rendezvous import meet, open_private_store, read_refusal, share_refusal
from hpctrain.rank.world import World, join
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import reserve_for_rank
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Claim, Ledger, StartFacts
from hpctrain.run.reason import Reason
from hpctrain.run.secret import discard_secret, read_secret, user_secret
from hpctrain.run.times import PhaseTimes
from hpctrain.scheduler.slurm import Slurm
from hpctrain.streams import open_log
from hpctrain.train.loop import AttemptContext, Loop
from hpctrain.train.stopping import Stopping
from hpctrain.train.trainer import train

DIRECTORY_KEY = "hpctrain/run_dir"
ATTEMPT_KEY = "hpctrain/attempt"
TOPIC = "run directory"
"""What rank zero may refuse: it can't make the run directory, or claim the attempt."""
DETERMINISM_COSTS = (
    "trainer.deterministic=true: some operations use slower algorithms, those of cuDNN among them, and operations "
    "without a deterministic algorithm raise an error"
)

log = logging.getLogger("hpctrain.train")


def run_attempt(rank: Rank, run_directory: Callable[[], RunDirectory]) -> Reason:
    """Train as one rank of the world; collective.

    Args:
        rank: this rank; its attempt, log, world and running training are set here.
        run_directory: returns the run directory, and makes it if it doesn't exist; called on rank zero.

    Returns:
        `completed`, or why the ranks stopped.
    """
    rank.times.enter("rendezvous_s")
    config, environment = rank.config, rank.environment
    spare_compiler()
    num_shares = data_parallel_size(config.parallel, environment.world_size, environment.local_world_size)
    check_batch(config, num_shares, environment.world_size // num_shares)
    threads = cpu_threads(environment, config.cluster.cpus_per_process, os.environ)
    if threads is not None:
        torch.set_num_threads(threads)
    store = _meet(rank)
    member = rank.member = Member(environment=environment, claim=_agree_on_attempt(rank, store, run_directory))
    reserve_for_rank(member.claim_folder, environment.rank)
    directory = member.directory
    terminal = _terminal(rank)
    if terminal is not None:
        # no handler of logging: what this process prints arrives there already
        log_stream: TextIO | None = open_log(directory.rank_log(0))
    else:
        log_stream = None if rank.handover.logged else _log_to_file(directory, environment.rank)
    rank.log_stream = log_stream
    set_determinism(config.trainer.deterministic, cudnn_benchmark=config.trainer.cudnn_benchmark)
    world = rank.world = _join(rank, store)
    return _train(rank, world, member.claim, log_stream, terminal)


def _train(
    rank: Rank, world: TrainingWorld, claim: Claim, log_stream: TextIO | None, terminal: TextIO | None
) -> Reason:
    config, is_log = rank.config, log_stream is None
    hosts = world.gather(rank.environment.node_name or socket.gethostname())
    if hosts is not None:
        rank.times.record_in(claim.ledger.directory.attempt(claim.attempt))
    rank.times.enter("build_s")
    stopping = Stopping(world, rank.environment, rank.stop, pause_at=_pause_at(rank, world, claim), claim=claim)
    attempt = AttemptContext(
        claim=claim,
        stopping=stopping,
        times=rank.times,
        hosts=hosts,
        log_stream=log_stream,
        bar=open_bar(config.trainer.progress, terminal or sys.stdout, is_log=is_log) if rank.is_rank_zero else None,
    )
    finished = train(config, world, attempt, partial(_record_start, rank, attempt))
    world.close()
    return Reason.COMPLETED if finished else stopping.reason


def _pause_at(rank: Rank, world: World, claim: Claim) -> int | None:
    """The step after which the run pauses, as rank zero finds it in the ledger; collective."""
    asked = rank.config.trainer.pause_at_step
    if asked is None:
        return None
    found: int | None = world.broadcast(next_pause(claim.ledger.attempts(), asked) if world.is_rank_zero else None)
    if found is None:
        log.info("already paused at trainer.pause_at_step=%d; continuing", asked)
    return found


def _meet(rank: Rank) -> Store | None:
    config, environment = rank.config, rank.environment
    if environment.world_size == 1:
        return None
    choose_interface(config.cluster.network_interface, environment.node_addresses)
    timeout_s, init_method = config.health.meeting_timeout_s, config.parallel.init_method
    if rank.handover.store and init_method == "env://":
        return open_private_store(Path(rank.handover.store), environment.world_size, timeout_s)
    # ranks that were started by hand have no claim yet
    member = rank.member
    secret = user_secret(os.environ) if member is None else read_secret(member.claim_folder)
    token = f"{environment.token}/{None if member is None else member.attempt}"
    store = meet(environment, init_method=init_method, secret=secret, token=token, timeout_s=timeout_s)
    if member is not None and rank.is_rank_zero:
        discard_secret(member.claim_folder)
    return store


def _join(rank: Rank, store: Store | None) -> TrainingWorld:
    config, place = rank.config, rank.environment
    backend, devices = config.parallel.backend, choose_compatible_devices(place, config, store)
    if rank.is_rank_zero and config.trainer.deterministic and devices[0].type == "cuda":
        log.warning(DETERMINISM_COSTS)
    timeout_s = config.health.collective_timeout_s
    world = join(
        place,
        store,
        backend=backend,
        devices=devices,
        cores=cpu_cores(place, config.cluster.cpus_per_process),
        timeout_s=timeout_s,
        cpu_tensors=config.parallel.cpu_offload,
    )
    return join_mesh(world, mesh_shape(config.parallel, place.world_size, place.local_world_size), timeout_s)


def _record_start(rank: Rank, attempt: AttemptContext, running: Loop) -> None:
    """Record the start in the ledger, and start the processes that send the run to services; on rank zero."""
    rank.running = running
    if attempt.hosts is None:
        return
    claim, environment, training = attempt.claim, rank.environment, running.training
    resumed, device = running.start_point.resumed_world_size, training.world.device
    claim.require_ownership()
    installed = _installed_torch()
    versions = read_json_or_empty(claim.ledger.directory.manifest).get("versions")
    submitter = versions.get("torch") if isinstance(versions, dict) else None
    if warning := other_torch(installed, claim.ledger.attempts(), submitter):
        log.warning("%s", warning)
    facts = StartFacts(
        restart_count=environment.restart_count,
        total_steps=training.total_steps,
        keep_best=training.checkpoint_policy.keep_best or 0,
        launched=rank.times.launched,
        code=rank.handover.code or None,
        torch=installed,
        resumed_world_size=None if resumed == environment.world_size else resumed,
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    )
    claim.ledger.start(
        claim.attempt,
        facts,
        PhaseTimes(**rank.times.spent()),
        job_id=environment.job_id,
        nodes=list(dict.fromkeys(attempt.hosts)),
        world_size=environment.world_size,
        step=running.step,
    )
    rank.start_senders()


def _installed_torch() -> str:
    try:
        # as in the manifest; torch's own text may also name the build
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # built from source
        return str(torch.__version__)


def _agree_on_attempt(rank: Rank, store: Store | None, run_directory: Callable[[], RunDirectory]) -> Claim:
    """Return the claim of the attempt, which rank zero shares with the others through the store.

    Raises:
        RunDirectoryError: on the other ranks, if rank zero couldn't make the directory or claim the attempt.
    """
    if not rank.is_rank_zero:
        assert store is not None
        if refusal := read_refusal(store, TOPIC):
            raise RunDirectoryError(refusal)
        path = store.get(DIRECTORY_KEY).decode()
        return Claim(Ledger(RunDirectory.existing(path)), int(store.get(ATTEMPT_KEY).decode()))
    num_others = rank.environment.world_size - 1
    try:
        claim = _claim_by_hand(rank, run_directory()) if rank.member is None else rank.member.claim
    except Exception as error:
        if store is not None:
            share_refusal(store, TOPIC, str(error) or type(error).__name__, num_others)
        raise
    if store is not None:
        share_refusal(store, TOPIC, "", num_others)
        store.set(DIRECTORY_KEY, str(claim.ledger.directory.path))
        store.set(ATTEMPT_KEY, str(claim.attempt))
    return claim


def _claim_by_hand(rank: Rank, directory: RunDirectory) -> Claim:
    """Close earlier attempts and claim this one, as a launcher does; the ranks were started by hand."""
    place = rank.environment
    UnrecordedEnds(directory, Slurm(), place.job_id, place.restart_count).close(place.world_size)
    ledger = Ledger(directory)
    attempt = ledger.claim()
    if place.job_id is None:
        Owner.write(directory.attempt(attempt))
    return Claim(ledger, attempt)


def _terminal(rank: Rank) -> TextIO | None:
    """The terminal of the launcher, if this rank may draw a bar there."""
    descriptor = rank.handover.terminal
    if descriptor is None or not rank.is_rank_zero or rank.config.trainer.progress == "lines":
        return None
    # a process that a task starts has the variable, but not the descriptor
    if not os.isatty(descriptor):
        return None
    os.set_inheritable(descriptor, False)
    return os.fdopen(descriptor, "w", encoding=sys.stdout.encoding, errors="backslashreplace")


def _log_to_file(directory: RunDirectory, rank: int) -> TextIO:
    stream = open_log(directory.rank_log(rank))
    handler = logging.FileHandler(directory.rank_log(rank), delay=True)
    handler.setStream(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", DATE_TIME))
    logging.getLogger("hpctrain").addHandler(handler)
    return stream
