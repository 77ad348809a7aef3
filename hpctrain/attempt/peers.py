"""Signs that a rank waits for another one or has lost it: messages of torch, and frames of Python."""

from __future__ import annotations

import os
import re

from hpctrain.attempt.lost_gpu import DEVICE_CODE_ERROR, GPU_OUT_OF_MEMORY, GPU_UNUSABLE

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
    # "invalid" errors of NCCL are mistakes in the task or the configuration, and recur in every attempt; so do those
    # whose further lines name this rank's own GPU memory or code
    rf"|NCCL error( in: [^,\n]*,| \d+:|:)"
    rf"(?! invalid (usage|argument)|[\s\S]*({GPU_OUT_OF_MEMORY.pattern}|{DEVICE_CODE_ERROR.pattern}))"
    r"|unhandled system error|remote process exit(ed|ing)|unexpected exit of a remote peer"
    r"|NCCL communicator was aborted|NCCL operations have failed or timed out|NCCL timeout in"
    r"|retrieving ncclUniqueId from",
    re.IGNORECASE,
)
"""Messages of the same backends when another rank has died. A backend's name isn't enough: usage errors have it too."""
MACHINE = re.compile(rf"DataLoader worker \(pid.*(is killed by signal|exited unexpectedly)|{GPU_UNUSABLE.pattern}")
"""torch's messages about DataLoader workers that the system killed, such as for their memory, or about a broken GPU."""

NCCL_ERRORS = {
    "TIMEOUT": "NCCL timed out: another rank didn't join a collective; see the stacks and the logs of the other ranks",
    "REMOTE_ERROR": "NCCL reports that another rank failed; see the logs of the other ranks",
    "COMM_ERROR": "NCCL reports that it failed here, or lost another rank; see the logs of all ranks, and set "
    "cluster.env.NCCL_DEBUG=WARN to have NCCL print the cause",
}
"""What to report of each error of torch's NCCL backend (torch/csrc/distributed/c10d/Backend.hpp, ErrorType)."""

_WAITING = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/hpctrain/parallel/", "/hpctrain/rank/")
"""Parts of the paths of modules whose innermost call waits for other ranks."""
_OWN = tuple(f"/hpctrain/rank/{name}.py" for name in ("entry", "rank", "stacks", "watchdog"))
"""Modules beside those that attend to this process alone."""
_BACKWARD = "/torch/autograd/graph.py"
"""DDP waits for the other ranks' gradients in this module, in C++ frames that Python doesn't show."""


def waits_for_peers(path: str) -> bool:
    """Whether a rank whose innermost Python frame is in this module waits for other ranks.

    A guess: on a GPU a rank waits wherever it first needs a result, and only `run.collectives` shows it.
    """
    path = path.replace(os.sep, "/")
    if path.endswith(_OWN):
        return False
    return any(part in path for part in _WAITING) or path.endswith(_BACKWARD)
