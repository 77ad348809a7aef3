"""Whom an error blames: what is trained, the machine, or another rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpctrain.errors import CheckpointError, CheckpointUnlikeError, RendezvousError
from hpctrain.run.reason import Reason

TIMED_OUT = re.compile(
    r"Timed out waiting \d+ ?ms|timed out after|wait timeout after|caused pair closure|monitoredBarrier"
    r"|collective operation timeout|before timing out",
    re.IGNORECASE,
)
"""What torch's backends (gloo, the store, NCCL's watchdog) say when another rank didn't come in time."""
PEER_LOST = re.compile(
    r"Connection (closed|reset|refused) by|Connection reset|Broken pipe"
    r"|recvValue failed|sendBytes failed|DistNetworkError|DistStoreError|Socket closed"
    # from a socket of gloo's; "[enforce fail at ...]" is sizes that differ among ranks, the task's own mistake
    r"|\[\S*/gloo/transport/\S+:\d+\] |Gloo connectFullMesh failed"
    # what NCCL calls invalid is a mistake of the task's or of the configuration, on every attempt
    r"|NCCL error( in: [^,\n]*,| \d+:|:)(?! invalid (usage|argument))"
    r"|unhandled system error|remote process exit(ed|ing)|unexpected exit of a remote peer"
    r"|NCCL communicator was aborted|NCCL operations have failed or timed out|NCCL timeout in"
    r"|retrieving ncclUniqueId from",
    re.IGNORECASE,
)
"""What they say when another rank is gone. Their bare names say nothing: they stand in errors of usage as well."""
MACHINE = re.compile(
    r"DataLoader worker \(pid.*(is killed by signal|exited unexpectedly)"
    r"|CUDA error: .*(uncorrectable|ECC|NVLink|hardware stack|fallen off the bus)"
)
"""What torch says of loading processes that the system killed, for their memory say, and of a broken GPU."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The end that follows from an error.

    Attributes:
        reason: of the rank's end.
        peer: the cause is to be sought in another rank.
    """

    reason: Reason
    peer: bool = False


def blame(error: BaseException, world_size: int) -> Blame:
    """Whom an error of one rank blames.

    Only torch is believed, and what it raises are RuntimeErrors: a download of the task's own may time out as well.
    """
    if isinstance(error, RendezvousError):
        # nothing of the task's has run yet: a node, a network, ports that others took
        return Blame(Reason.INFRASTRUCTURE, peer=error.waited)
    if isinstance(error, CheckpointUnlikeError):
        return Blame(Reason.INFRASTRUCTURE)
    if not isinstance(error, RuntimeError):
        return Blame(Reason.FAILED, peer=isinstance(error, CheckpointError) and error.elsewhere)
    return _of_torch(f"{type(error).__name__}: {error}", world_size)


def _of_torch(text: str, world_size: int) -> Blame:
    if MACHINE.search(text):
        return Blame(Reason.INFRASTRUCTURE)
    if world_size > 1 and TIMED_OUT.search(text):
        return Blame(Reason.HANG, peer=True)
    if world_size > 1 and PEER_LOST.search(text):
        return Blame(Reason.INFRASTRUCTURE, peer=True)
    return Blame(Reason.FAILED)
