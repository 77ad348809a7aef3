"""Classify the error that ended a rank: the task's own, the machine's, or another rank's."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.attempt.peers import MACHINE, PEER_LOST, TIMED_OUT
from hpctrain.errors import (
    CheckpointError,
    CheckpointUnlikeError,
    DeviceError,
    RendezvousError,
    TaskError,
    error_text,
)
from hpctrain.run.reason import Reason


@dataclass(frozen=True, slots=True)
class Classification:
    """The meaning of an error for the rank that raised it.

    Attributes:
        reason: why the rank ended.
        peer: whether the error points at another rank, whose own record names the cause.
    """

    reason: Reason
    peer: bool = False


def classify(error: BaseException, world_size: int) -> Classification:
    """Classify an error that ended a rank, in a world of this size."""
    if isinstance(error, RendezvousError):
        # no code of the task has run yet: the cause is a node, the network, or a port that another program took
        return Classification(Reason.INFRASTRUCTURE, peer=error.waited)
    if isinstance(error, DeviceError):
        return Classification(Reason.INFRASTRUCTURE if error.machine_at_fault else Reason.FAILED, peer=error.elsewhere)
    if isinstance(error, CheckpointUnlikeError):
        return Classification(Reason.INFRASTRUCTURE)
    # torch raises RuntimeErrors; other types with the same text are the task's, such as a download that timed out
    if not isinstance(error, RuntimeError):
        elsewhere = isinstance(error, CheckpointError | TaskError) and error.elsewhere
        return Classification(Reason.FAILED, peer=elsewhere)
    return _of_torch(f"{type(error).__name__}: {error_text(error)}", world_size)


def _of_torch(text: str, world_size: int) -> Classification:
    if MACHINE.search(text):
        return Classification(Reason.INFRASTRUCTURE)
    if world_size > 1 and TIMED_OUT.search(text):
        return Classification(Reason.HANG, peer=True)
    if world_size > 1 and PEER_LOST.search(text):
        return Classification(Reason.INFRASTRUCTURE, peer=True)
    return Classification(Reason.FAILED)
