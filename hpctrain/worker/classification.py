"""Classify the error that ended a rank: the task's own, the machine's, or another rank's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpctrain.errors import CheckpointError, CheckpointUnlikeError, RendezvousError, TaskError, error_text
from hpctrain.run.reason import Reason

TIMED_OUT = re.compile(
    r"Timed out waiting \d+ ?ms|Timeout waiting for key|timed out after|wait timeout after|caused pair closure"
    r"|monitoredBarrier|collective operation timeout|before timing out",
    re.IGNORECASE,
)
"""Messages of torch's backends (gloo, the store, NCCL's watchdog) when another rank didn't arrive in time."""
PEER_LOST = re.compile(
    r"Connection (closed|reset|refused) by|Connection reset|Broken pipe"
    r"|recvValue failed|sendBytes failed|DistNetworkError|DistStoreError|Socket closed"
    # from one of gloo's sockets; "[enforce fail at ...]" means sizes that differ among ranks: the task's own mistake
    r"|\[\S*/gloo/transport/\S+:\d+\] |Gloo connectFullMesh failed"
    # "invalid" errors of NCCL are mistakes in the task or the configuration, and recur in every attempt
    r"|NCCL error( in: [^,\n]*,| \d+:|:)(?! invalid (usage|argument))"
    r"|unhandled system error|remote process exit(ed|ing)|unexpected exit of a remote peer"
    r"|NCCL communicator was aborted|NCCL operations have failed or timed out|NCCL timeout in"
    r"|retrieving ncclUniqueId from",
    re.IGNORECASE,
)
"""Messages of the same backends when another rank has died. A backend's name isn't enough: usage errors have it too."""
MACHINE = re.compile(
    r"DataLoader worker \(pid.*(is killed by signal|exited unexpectedly)"
    r"|CUDA error: .*(uncorrectable|ECC|NVLink|hardware stack|fallen off the bus)"
)
"""torch's messages about DataLoader workers that the system killed, such as for their memory, or about a broken GPU."""


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
