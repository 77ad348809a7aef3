"""The collectives that this rank has begun, from torch's flight recorder: the evidence of who waits for whom."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain.run.exit_record import Collectives

READ_S = 2.0
"""Seconds for reading: torch asks the device about each collective, and the device may be what hangs. Other ranks wait
a little longer for the record with the result (`worker.rank.PEERS_S`)."""
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""torch's functions for the recorders of NCCL, in builds with it, and of the other backends."""


def read_collectives(within_s: float = READ_S) -> Collectives | None:
    """Read this rank's flight recorders; None if they don't answer in time, or in an unknown format.

    Args:
        within_s: bound in seconds.
    """
    found: list[Collectives] = []

    def read() -> None:
        with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):  # another version's format
            found.append(summarize(_entries()))

    thread = threading.Thread(target=read, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(within_s)
    return found[0] if found else None


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
