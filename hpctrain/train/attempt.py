"""One attempt on one rank: meet the other ranks, join them, build, resume, run the loop, leave."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch._C._distributed_c10d import Store

from hpctrain.attempt.lost_gpu import closing_unless_lost
from hpctrain.attempt.rank_python import other_torch
from hpctrain.attempt.requeue import next_pause
from hpctrain.attempt.unrecorded import UnrecordedEnds
from hpctrain.checkpoint.read import prepare_resume
from hpctrain.cluster.environment import cpu_cores, cpu_threads
from hpctrain.config.mesh import mesh_shape, shares_and_stages
from hpctrain.config.resources import check_batch
from hpctrain.config.root import Config
from hpctrain.data.loader import TrainLoader
from hpctrain.data.micro_batch import MicroBatch
from hpctrain.errors import ConfigError, RunDirectoryError
from hpctrain.files import read_json_or_empty
from hpctrain.metrics.progress import open_bar
from hpctrain.parallel.mesh import TrainingWorld, join_mesh
from hpctrain.phrases import DATE_TIME
from hpctrain.rank.compiler import spare_compiler
from hpctrain.rank.determinism import rank_seed, seed_everything, set_determinism
from hpctrain.rank.devices import choose_compatible_devices
from hpctrain.rank.interface import choose_interface
from hpctrain.rank.rank import Member, Rank
from hpctrain.rank.rendezvous import meet, open_private_store, read_refusal, share_refusal
from hpctrain.rank.world import World, join
from hpctrain.run.bottleneck import read_bottleneck
from hpctrain.run.directory import RunDirectory
from hpctrain.run.file_system import reserve_for_rank
from hpctrain.run.launcher import Owner
from hpctrain.run.ledger import Claim, Ledger, StartFacts
from hpctrain.run.reason import Reason
from hpctrain.run.secret import discard_secret, read_secret, user_secret
from hpctrain.run.times import PhaseTimes
from hpctrain.scheduler.slurm import Slurm
from hpctrain.streams import open_log
from hpctrain.train.checkpointing import Checkpointing, StartPoint
from hpctrain.train.divergence import Divergence
from hpctrain.train.loop import AttemptContext, Loop
from hpctrain.train.profiling.profiler import Profiler
from hpctrain.train.start_table import log_start
from hpctrain.train.stopping import Stopping
from hpctrain.train.training import Training, build
from hpctrain.train.training_log import TrainingLog, cut_sample_logs, log_samples
from hpctrain.train.update import unknown_optimizers_refused

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
        rank: this rank; its attempt, log, world and loop are set here.
        run_directory: returns the run directory, and makes it if it doesn't exist; called on rank zero.

    Returns:
        `completed`, or `Stopping.reason`: why the ranks stopped.
    """
    rank.times.enter("rendezvous_s")
    config, environment = rank.config, rank.environment
    spare_compiler()
    num_shares, _ = shares_and_stages(config.parallel, environment.world_size, environment.local_world_size)
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
        rank.log_stream = open_log(directory.rank_log(0))
    elif not rank.launcher.logged:
        rank.log_stream = _log_to_file(directory, environment.rank)
    set_determinism(config.trainer.deterministic, cudnn_benchmark=config.trainer.cudnn_benchmark)
    world = rank.world = _join(rank, store)
    return _train(rank, world, member.claim, terminal)


def _train(rank: Rank, world: TrainingWorld, claim: Claim, terminal: TextIO | None) -> Reason:
    config, is_log = rank.config, rank.log_stream is None
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
        log_stream=rank.log_stream,
        bar=open_bar(config.trainer.progress, terminal or sys.stdout, is_log=is_log) if rank.is_rank_zero else None,
    )
    finished = train(config, world, attempt, partial(_record_start, rank, attempt))
    world.close()
    return Reason.COMPLETED if finished else stopping.reason


def _pause_at(rank: Rank, world: World, claim: Claim) -> int | None:
    """The step after which the run pauses, as rank zero finds it in the ledger; collective."""
    pause_at_step = rank.config.trainer.pause_at_step
    if pause_at_step is None:
        return None
    step: int | None = world.broadcast(
        next_pause(claim.ledger.attempts(), pause_at_step) if world.is_rank_zero else None
    )
    if step is None:
        log.info("already paused at trainer.pause_at_step=%d; continuing", pause_at_step)
    return step


def _meet(rank: Rank) -> Store | None:
    config, environment = rank.config, rank.environment
    choose_interface(config.cluster.network_interface, environment.node_addresses)
    if environment.world_size == 1:
        return None
    timeout_s, init_method = config.health.meeting_timeout_s, config.parallel.init_method
    if rank.launcher.store and init_method == "env://":
        return open_private_store(Path(rank.launcher.store), environment.world_size, timeout_s)
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


def _record_start(rank: Rank, attempt: AttemptContext, loop: Loop) -> None:
    """Record the start in the ledger, and start the processes that send the run to services; on rank zero."""
    # not before the checkpoint is restored: until then the rank has no step to report
    rank.loop = loop
    if attempt.hosts is None:
        return
    claim, environment, training = attempt.claim, rank.environment, loop.training
    resumed, device = loop.start_point.resumed_world_size, training.world.device
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
        code=rank.launcher.code or None,
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
        step=loop.step,
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
    descriptor = rank.launcher.terminal
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


def train(
    config: Config,
    world: TrainingWorld,
    attempt: AttemptContext,
    on_start: Callable[[Loop], None] = lambda _: None,
) -> bool:
    """Train one attempt of a run, on this rank; collective.

    Args:
        config: of the run.
        world: the ranks.
        attempt: in which it trains.
        on_start: called with the loop once the training is resumed, before its first step.

    Returns:
        Whether the run is complete; if not, the ranks stopped, or the run paused, and it is saved if there was time.

    Raises:
        TaskError: the task broke its contract.
        ConfigError: a key doesn't fit the task, or the evaluation doesn't return what `checkpoint.metric` names.
        CheckpointError: the run can't be resumed, or saved.
        SupersededError: a later attempt owns the run.
    """
    resumes = prepare_resume(attempt.directory, attempt.claim, world)
    training = build(config, world, resumes=resumes, stop=attempt.stopping.request, bar=attempt.bar)
    if training.evaluation is None:
        _refuse_without_evaluation(training)
    earlier = attempt.directory.newest(read_bottleneck) if world.is_rank_zero else None
    flops_per_sample = None if earlier is None else earlier.flops_per_sample
    loop, loader = _resume(training, attempt, flops_per_sample)
    on_start(loop)
    if attempt.hosts is not None:
        log_start(training, attempt.claim, step=loop.step, hosts=attempt.hosts, flops_per_sample=flops_per_sample)
    attempt.times.enter("first_step_s")
    # building and restoring may have taken long: a later attempt may own the metrics by now
    attempt.require_ownership(world)
    try:
        with attempt.sharing_terminal():
            return _run(loop, loader, attempt)
    finally:
        attempt.times.record(loop.step, force=True)


def _resume(training: Training, attempt: AttemptContext, flops_per_sample: float | None) -> tuple[Loop, TrainLoader]:
    """Restore the newest checkpoint, and return the loop after it, and its loader; collective."""
    directory, stopping, world = attempt.directory, attempt.stopping, training.world
    # the training was built from the same numbers on all ranks; from here on each rank draws its own
    seed_everything(rank_seed(training.config.seed, world.share.random_stream))
    attempt.times.enter("load_s")
    saver = training.network.saver(directory, attempt.claim, training.checkpoint_policy, stopping.request)
    checkpointing = Checkpointing(training, directory, saver, agreement=stopping.agreement, claim=attempt.claim)
    show = None if attempt.bar is None else partial(attempt.bar.show, "reading the checkpoint", in_gb=True)
    with attempt.sharing_terminal():
        start = checkpointing.resume(show)
    loader = training.data.loader(start.step, training.data.stream_state.bookmarks)
    profiler = Profiler(
        training,
        loader,
        stopping.agreement,
        attempt.times,
        start_step=start.step,
        flops_per_sample=flops_per_sample,
        trace=directory.trace(world.rank) if world.is_rank_zero else None,
    )
    loop = Loop(
        training,
        attempt,
        start,
        profiler=profiler,
        log=TrainingLog(training, start, profiler, attempt.times),
        checkpointing=checkpointing,
        divergence=Divergence(training, directory, saver, start.step),
    )
    return loop, loader


def _run(loop: Loop, loader: TrainLoader, attempt: AttemptContext) -> bool:
    """Run the steps that remain, and save the last one; return whether the run is complete; collective."""
    training, saver = loop.training, loop.checkpointing.saver
    # in a new run, and in one that resumes with another configuration
    try_out = loop.step == 0 or bool(training.world.broadcast(attempt.directory.config_before.exists()))
    if not loop.start(try_out=try_out):
        saver.finish()
        return False
    # the evaluation may have taken long as well
    attempt.require_ownership(training.world)
    with loop.log.opened(attempt.directory, attempt.log_stream, attempt.bar):
        # end the loading processes first: the last write can use their cores
        with (
            closing_unless_lost(_micro_batches(training, loader, attempt, loop.start_point)) as micro_batches,
            unknown_optimizers_refused(training.step.turns),
        ):
            finished = loop.run(micro_batches)
        saver.finish()
        loop.conclude(finished=finished)
    return finished


def _refuse_without_evaluation(training: Training) -> None:
    """Refuse settings that need an evaluation, and warn of callbacks that do."""
    why = "nothing is evaluated: the task has no eval_dataset"
    keep_best = training.config.checkpoint.keep_best
    if keep_best:
        raise ConfigError("checkpoint.keep_best", keep_best, why, "set it to 0")
    for rate in (update.learning_rate for update in training.step.updates):
        if rate.metric is not None:
            remedy = "choose another schedule, such as cosine"
            raise ConfigError(rate.key, "plateau", why, remedy)
    training.callbacks.require_evaluation(why, warns=training.world.is_rank_zero)


def _micro_batches(
    training: Training, loader: TrainLoader, attempt: AttemptContext, start: StartPoint
) -> Generator[MicroBatch, None, None]:
    world = training.world
    directory = attempt.directory
    position = training.position
    # a stop while loading saves the step before: a before_step hook has already run, and may have changed its state
    loading = None
    if not training.callbacks.hooks["before_step"]:
        loading = attempt.stopping.agreement.loading_stop(lambda: f"step/{position.step}")
    micro_batches = loader.micro_batches(training.data.transfer, loading)
    if training.data.loss_weights.vary:
        micro_batches = training.data.loss_weights.of_steps(micro_batches)
    if not training.config.logger.samples or not world.share.is_counted:
        return micro_batches
    if world.is_rank_zero:
        cut_sample_logs(directory, range(0, world.size, world.share.num_together), start.step)
    return log_samples(micro_batches, directory.sample_log(world.rank), start.step)
