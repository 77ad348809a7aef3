"""torch's process groups: those on the CPU, the variables of NCCL's, and the collectives that a rank has begun.

The variables keep torch's NCCL backend from ending the process on an error. The collectives come from torch's flight
recorder: the evidence of who waits for whom.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterable, Mapping, MutableMapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hpctrain.run.exit_record import Collectives

CONTROL = "control"
"""The name of the group for messages of the training thread, in torch's flight recorder."""
SAVING = "saving"
"""The name of the group for messages of the threads that write checkpoints."""
ASYNC_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ALIASES = {ASYNC_ERROR_HANDLING: "NCCL_ASYNC_ERROR_HANDLING"}
"""Older names that torch still reads (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp)."""
SET_BY_TORCHRUN = {ASYNC_ERROR_HANDLING: "1"}
"""What torchrun sets if its user doesn't (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
HEARTBEAT_MARGIN_S = 60
"""Seconds between the bound on a collective and the one on torch's watchdog."""
LONGEST_S = 2_147_483
"""torch counts the bound in milliseconds, in an int of 32 bits."""
READ_S = 2.0
"""Seconds for reading: torch asks the device about each collective, and the device may be what hangs. Other ranks wait
a little longer for the record with the result (`attempt.hang.PEERS_S`)."""
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""torch's functions for the recorders of NCCL, in builds with it, and of the other backends."""


def gloo_group(store: Store, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Make a group of all ranks for messages on the CPU; collective.

    Args:
        store: of the ranks.
        timeout: bound on each collective.
        name: of the group, in torch's flight recorder.
    """
    # new_group has no argument for a store, and takes that of the default group: NCCL's, which isn't sealed
    groups = dist.distributed_c10d._world.pg_map
    default = dist.group.WORLD
    assert default is not None
    before = groups[default]
    groups[default] = before[0], PrefixStore(name, store)
    try:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc=name)
    finally:
        groups[default] = before
    return group


def nccl_defaults(collective_timeout_s: float) -> dict[str, str]:
    """Return hpctrain's values, by variable.

    With torch's own values, its watchdog thread aborts the process as soon as NCCL or CUDA reports an error. No exit
    record is written then, an error of the task looks like one of the machine, and a checkpoint that is being written
    is lost. With these, the thread only records the error: `World.communication_error` reads what NCCL reports, and
    CUDA's errors are raised where the task waits for the device.

    Args:
        collective_timeout_s: bound on a collective, above the bounds of hpctrain's own watchdog.
    """
    return {
        ASYNC_ERROR_HANDLING: "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        # after an error, torch's dump would end all ranks, and write files to the home directory
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        # torch's default of 480 s is below hpctrain's bound on a hang
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(min(math.ceil(collective_timeout_s) + HEARTBEAT_MARGIN_S, LONGEST_S)),
    }


def set_nccl_variables(environ: MutableMapping[str, str], collective_timeout_s: float) -> None:
    """Set the variables that the user didn't; before the process group is made.

    Args:
        environ: of this process.
        collective_timeout_s: as for `nccl_defaults`.
    """
    user_variables = user_nccl_variables(environ, collective_timeout_s)
    for name, value in nccl_defaults(collective_timeout_s).items():
        if name not in user_variables and ALIASES.get(name) not in user_variables:
            environ[name] = value


def user_nccl_variables(environ: Mapping[str, str], collective_timeout_s: float) -> dict[str, str]:
    """Return the variables that the user set to other values than hpctrain's.

    Args:
        environ: of this process.
        collective_timeout_s: as for `nccl_defaults`.
    """
    variables = {}
    by_torchrun = SET_BY_TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else {}
    for name, default in nccl_defaults(collective_timeout_s).items():
        for spelling in filter(None, (name, ALIASES.get(name))):
            value = environ.get(spelling)
            if value is not None and value not in (default, by_torchrun.get(spelling)):
                variables[spelling] = value
    return variables


def read_collectives(within_s: float = READ_S) -> Collectives | None:
    """Read this rank's flight recorders; None if they don't answer in time, or in an unknown format.

    Args:
        within_s: bound in seconds.
    """
    collectives: list[Collectives] = []

    def read() -> None:
        with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):  # another version's format
            collectives.append(summarize(_entries()))

    thread = threading.Thread(target=read, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(within_s)
    return collectives[0] if collectives else None


def summarize(entries: Iterable[Mapping[str, Any]]) -> Collectives:
    """Sum up entries of a flight recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2).

    Args:
        entries: as in its JSON.
    """
    begun: dict[str, int] = {}
    unfinished = []
    for entry in entries:
        if entry["is_p2p"]:  # between two ranks, so the others don't count it
            continue
        backend, _, operation = entry["profiling_name"].partition(":")
        name, description = entry["process_group"]
        group = f"{backend} {name if description in ('', 'undefined') else description}"
        number = int(entry["collective_seq_id"])
        begun[group] = max(begun.get(group, 0), number)
        if not entry["retired"]:
            unfinished.append((int(entry["time_created_ns"]), group, operation, number))
    if not unfinished:
        return Collectives(begun)
    _, group, operation, number = min(unfinished)
    return Collectives(begun, group, operation, number)


def _entries() -> list[Mapping[str, Any]]:
    from torch._C import _distributed_c10d

    entries: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for name in DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        for entry in [] if dump is None else json.loads(dump()).get("entries", ()):
            # newer versions of torch return NCCL's entries from both functions
            entries[entry["profiling_name"], *entry["process_group"], entry["record_id"]] = entry
    return list(entries.values())
