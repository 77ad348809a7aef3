"""A rank from its environment to its exit record; light, so that signals are handled before torch is imported."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpctrain.cluster.environment import ClusterEnvironment
from hpctrain.config.root import Config
from hpctrain.distributed.stop_request import STOP_SIGNALS, StopRequest
from hpctrain.errors import ExitCode, HpctrainError, RendezvousError, SupersededError
from hpctrain.run.directory import RunDirectory
from hpctrain.run.exit_record import ExitRecord, first_cause, read_exit_records
from hpctrain.run.handover import Handover
from hpctrain.run.reason import Reason
from hpctrain.run.stacks import ask
from hpctrain.run.times import Times, process_age_s
from hpctrain.worker.by_hand import close_by_hand
from hpctrain.worker.classification import blame
from hpctrain.worker.hang import watch

if TYPE_CHECKING:
    from hpctrain.distributed.world import World
    from hpctrain.train.trainer import Trainer

PR_SET_PDEATHSIG = 1
PEER_PATIENCE_S = 2.5
"""Seconds that the peers get for their own last words; they look for requests every `watchdog.LOOK_S`."""
WRITE_PATIENCE_S = 20.0
"""Seconds that a checkpoint gets that is being written when its rank fails: rank zero has all of it in memory. SLURM
kills what a failed rank leaves over after its KillWait, 30 s where a site says nothing else."""

log = logging.getLogger("hpctrain.train")


@dataclass(slots=True)
class Rank:
    """What is known of this rank so far; whatever ends it finds here what to write down.

    Attributes:
        config: of the run.
        environment: its place.
        handover: from its launcher.
        stop: its request to stop.
        directory: of the run, once it is known.
        attempt: its number, once it is known.
        world: the ranks, once they have met.
        trainer: once it is built.
        times: where its time goes.
    """

    config: Config
    environment: ClusterEnvironment
    handover: Handover
    stop: StopRequest
    directory: RunDirectory | None = None
    attempt: int | None = None
    world: World | None = None
    trainer: Trainer | None = None
    times: Times = field(default_factory=lambda: Times(0.0))

    @property
    def step(self) -> int:
        """Steps that are completed, as far as this rank knows."""
        return self.trainer.step if self.trainer is not None else 0

    @property
    def progress(self) -> object:
        """Another value whenever this rank got on."""
        return self.trainer.progress if self.trainer is not None else None

    def leave_record(self, reason: Reason, error: BaseException | None = None, *, blames_peer: bool = False) -> None:
        """Write the exit record; nothing where the attempt isn't known yet, or the file system refuses."""
        if self.directory is None or self.attempt is None:
            return
        record = ExitRecord(
            rank=self.environment.rank,
            host=socket.gethostname(),
            reason=reason,
            step=self.step,
            message="" if error is None else f"{type(error).__name__}: {error}",
            traceback="" if error is None else "".join(traceback.format_exception(error)),
            blames_peer=blames_peer,
            stop_signal=self.stop.last_signal,
            time=time.time(),
        )
        try:
            record.write(self.directory.claim(self.attempt))
        except OSError as refused:
            log.warning("the exit record can't be written: %s", refused)

    def leave_world(self) -> None:
        """Leave the others without waiting for them: after the exit record, since they look for it when they notice."""
        if self.world is not None:
            self.world.abort()

    def close_attempt(self, reason: Reason, detail: str = "") -> None:
        """Record the attempt's end and see to what follows, where no launcher does: the ranks were started by hand."""
        if self.directory is None or self.attempt is None or self.handover.attempt is not None:
            return
        close_by_hand(
            self.directory,
            self.attempt,
            reason=reason,
            step=self.step,
            detail=detail,
            stop_signal=self.stop.last_signal,
            environment=self.environment,
            config=self.config,
        )


def main(config: Config, directory: RunDirectory | None, make_directory: Callable[[], RunDirectory] | None) -> int:
    """Train as one rank.

    Args:
        config: of the run.
        directory: the run directory, where it exists already.
        make_directory: makes it, on rank zero.

    Returns:
        An `ExitCode`.

    Raises:
        ClusterEnvironmentError: this process's place can't be derived.
    """
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopRequest()
    stop.install()
    handover = Handover.read(os.environ)
    end_with_parent(handover.parent)
    environment = ClusterEnvironment.from_environment(os.environ, master_port=config.cluster.master_port)
    log_to_console(environment.rank)
    # a process that has torch did something else before
    times = Times(0.0 if "torch" in sys.modules else process_age_s())
    rank = Rank(config, environment, handover, stop, directory, attempt=handover.attempt, times=times)
    try:
        return _run(rank, make_directory)
    finally:
        close_log_files()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run(rank: Rank, make_directory: Callable[[], RunDirectory] | None) -> int:
    try:
        with watch(rank):
            from hpctrain.worker.attempt import run_attempt

            reason = run_attempt(rank, make_directory)
    except SupersededError as error:
        log.warning("%s", error)
        rank.leave_record(Reason.INTERRUPTED, error)
        rank.leave_world()
        return ExitCode.INTERRUPTED
    except HpctrainError as error:
        if rank.directory is None and rank.environment.rank and not isinstance(error, RendezvousError):
            return error.exit_code  # rank zero says it for all, where there is one
        return _failed(rank, error)
    except KeyboardInterrupt as error:
        rank.leave_record(Reason.INTERRUPTED, error)
        rank.leave_world()
        rank.close_attempt(Reason.INTERRUPTED, "a second Ctrl-C")
        return ExitCode.INTERRUPTED
    except BaseException as error:
        return _failed(rank, error)
    rank.leave_record(reason)
    if rank.environment.rank == 0:
        rank.close_attempt(reason)
    return reason.meaning.exit_code


def _failed(rank: Rank, error: BaseException) -> int:
    found = blame(error, rank.environment.world_size)
    reason, blames_peer = found.reason, found.peer
    rank.leave_record(reason, error, blames_peer=blames_peer)
    rank.leave_world()
    place = f"rank {rank.environment.rank} on {socket.gethostname()}"
    if blames_peer:
        missed = {Reason.INFRASTRUCTURE: "lost", Reason.HANG: "waited in vain for"}.get(reason, "ends with")
        log.warning("%s %s another rank: %s", place, missed, str(error).splitlines()[0])
    elif isinstance(error, HpctrainError):
        print(f"hpctrain: {place}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - logging may be the victim
    else:
        text = "".join(traceback.format_exception(error))
        print(f"hpctrain: {place} failed:\n{text}", file=sys.stderr, flush=True)  # noqa: T201 - as above
    detail = f"{place}: {type(error).__name__}: {error}"
    if rank.trainer is not None:
        with contextlib.suppress(KeyboardInterrupt):  # whoever presses Ctrl-C now doesn't want to wait for it
            rank.trainer.give_time(WRITE_PATIENCE_S)
    if blames_peer:
        reason, detail = _hear_peers(rank, reason, detail)
    rank.close_attempt(reason, detail)
    return error.exit_code if isinstance(error, HpctrainError) else ExitCode.FAILED


def _hear_peers(rank: Rank, reason: Reason, detail: str) -> tuple[Reason, str]:
    """What the peers have to say, if anything, is better than that they are gone or didn't come."""
    if rank.directory is None or rank.attempt is None:
        return reason, detail
    if reason is Reason.HANG:
        # who keeps the others waiting may still be able to show where it stands
        with contextlib.suppress(HpctrainError):
            ask(rank.directory.stacks_request(rank.attempt))
    time.sleep(PEER_PATIENCE_S)
    cause = first_cause(read_exit_records(rank.directory.claim(rank.attempt)))
    if cause is None or cause.rank == rank.environment.rank:
        return reason, detail
    return cause.reason, f"rank {cause.rank} on {cause.host}: {cause.message}"


def end_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its launcher dies (Linux, prctl(2))."""
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(ExitCode.INTERRUPTED)


def close_log_files() -> None:
    """Close what this attempt's log went to, so that a sweep in one process doesn't collect open files."""
    logger = logging.getLogger("hpctrain")
    for handler in [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
        logger.removeHandler(handler)
        handler.close()


def log_to_console(rank: int) -> None:
    """Rank zero tells how it goes; the others speak up only to warn."""
    logger = logging.getLogger("hpctrain")
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler = logging.StreamHandler(sys.stdout if rank == 0 else sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    logger.addHandler(handler)
